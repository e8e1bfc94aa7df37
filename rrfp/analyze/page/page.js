"use strict";
// Draws every chart at its place, as wide as that is, and anew when that changes. Text and lines
// have the colour of the page around them, so that a change of theme needs no drawing.
const AXIS = 50, SPACING = 16, LEGEND_ENTRY = 125;
const charts = JSON.parse(document.getElementById("charts").textContent);

function fitted(chart, width) {
  const spec = structuredClone(chart);
  spec.config.legend.columns = Math.max(1, Math.floor(width / LEGEND_ENTRY));
  if (spec.spec) {
    const { cells, cellWidth } = spec.usermeta;
    const most = Math.max(1, Math.floor(width / cellWidth));
    // As many rows as that takes, and all of them about as long.
    spec.columns = Math.ceil(cells / Math.ceil(cells / most));
    spec.spec.width = Math.floor((width - AXIS + SPACING) / spec.columns) - SPACING;
  } else {
    spec.width = width;
    spec.autosize = { type: "fit-x", contains: "padding" };
  }
  return spec;
}

const options = {
  actions: false,
  // The interpreter needs no leave to evaluate strings.
  ast: true,
  defaultStyle: false,
  renderer: "svg",
  tooltip: { disableDefaultStyle: true },
};
const drawn = new WeakMap();

async function draw(place) {
  const width = Math.floor(place.clientWidth);
  if (!width || drawn.get(place)?.width === width) return;
  const before = drawn.get(place)?.view;
  drawn.set(place, { width });
  const result = await vegaEmbed(place, fitted(charts[place.dataset.chart], width), options);
  before?.finalize();
  drawn.set(place, { width, view: result });
}

const places = [...document.querySelectorAll("[data-chart]")];
Promise.all(places.map(draw)).then(() => {
  document.documentElement.dataset.drawn = "yes";
  let pending;
  addEventListener("resize", () => {
    clearTimeout(pending);
    pending = setTimeout(() => places.forEach(draw), 150);
  });
});

// Perfetto's own trace processor as a pipe: requests on stdin, replies on stdout, both in the
// framing of `TraceProcessorRpcStream`. The engine is the one that the Perfetto UI runs in a worker
// of the browser; what it asks a worker's world for is all that is given to it here.
//
// usage: node trace_processor.js FOLDER, where FOLDER holds the UI's engine_bundle.js.

const fs = require("node:fs");
const path = require("node:path");
const vm = require("node:vm");

const [folder] = process.argv.slice(2);
const { stdin } = process;

// The engine refuses to run where it sees Node.
delete globalThis.process;
globalThis.WorkerGlobalScope = class {};
globalThis.self = { location: { href: "file:///engine_bundle.js" } };
globalThis.XMLHttpRequest = class {
  open(_method, url) {
    this.file = path.join(folder, path.basename(url));
  }
  send() {
    this.response = new Uint8Array(fs.readFileSync(this.file)).buffer;
  }
};
// Replies alone belong on stdout.
console.log = console.warn = console.error;

const writeWhole = (bytes) => {
  for (let done = 0; done < bytes.length; ) {
    try {
      done += fs.writeSync(1, bytes, done);
    } catch (error) {
      if (error.code !== "EAGAIN") throw error;
    }
  }
};
const port = { postMessage: writeWhole };

vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));
self.onmessage({ data: port });
// The engine is up once the promises that were made so far are kept.
setImmediate(() => stdin.on("data", (bytes) => port.onmessage({ data: new Uint8Array(bytes) })));

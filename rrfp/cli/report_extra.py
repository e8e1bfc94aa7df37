"""The extra `report`, which draws charts: whether it is installed."""

from importlib.util import find_spec

from rrfp.errors import RrfpError


def missing_for_charts() -> list[str]:
    """The packages that drawing charts needs and this installation lacks."""
    return [name for name in ("altair", "vl_convert") if find_spec(name) is None]


def check_report_extra() -> None:
    """Raise RrfpError when a package that draws charts is missing."""
    missing = missing_for_charts()
    if missing:
        raise RrfpError(
            f"charts need {' and '.join(missing)}, which this installation lacks; install the "
            "extra 'report' (pip install 'rrfp[report]')"
        )

"""The hint of a run with `--hint auto`, chosen by simulating steps that it has run."""

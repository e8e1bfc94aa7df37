"""From a recording to reports: analysis returns data, and the command line shows it."""

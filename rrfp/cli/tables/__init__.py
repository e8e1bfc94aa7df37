"""Tables for people: data in, sheets out, which print as tables of 80 columns or as Markdown."""

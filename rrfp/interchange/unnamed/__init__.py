"""Tasks that a trace times but does not number: which task of the pipeline each of them is."""

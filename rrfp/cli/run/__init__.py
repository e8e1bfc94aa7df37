"""`rrfp run`: its command line, and the program that it runs. Imports the standard library and rrfp
alone, since it runs inside of somebody's job."""

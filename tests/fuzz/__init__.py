"""Every reader, fed with damaged copies of what it reads: `python -m tests.fuzz`, or `make fuzz`.

An input ends well if the reader takes it or refuses it in a sentence, in bounded time and memory.
"""

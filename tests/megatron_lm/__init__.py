"""Megatron-LM's own `pretrain_gpt.py`, run on the CPU under Megatron's schedule and under ours, and
held against each other bit for bit.

    .venv/bin/python -m tests.megatron_lm /path/to/Megatron-LM [--only CASE] [--torchrun]

The checkout must be of the Megatron-Core that is installed; nothing of it is kept or changed here.
Every run is the command line of a user: `python pretrain_gpt.py ARGS` for Megatron's own schedule,
and `python -m rrfp run --hint bf pretrain_gpt.py ARGS` for ours.

Before the script runs, both get the same two things (`rank`): what makes Megatron-LM run without a
GPU (`cpu`), and a recorder of what each step came to (`recorder`). Ranks are forked from a process
that has imported Megatron (`server`), or started by torchrun, where Python's own hook
`sitecustomize` (`startup/`) does the same. `cases` says what is run, `harness` runs and compares.
"""

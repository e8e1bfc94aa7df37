"""Megatron-Core's own tests of its pipelines, run on the CPU with our schedule in place of
Megatron's.

    .venv/bin/python -m tests.megatron_own /path/to/Megatron-LM [--native] [pytest arguments]

The checkout must be of the Megatron-Core that is installed; nothing of it is kept here. Each test
gets eight forked ranks over gloo, as many as Megatron's own runs give it, and is run under

- `install()`: ours where `rrfp.megatron.install()` puts it, as a training script has it;
- every name: the very function that the getter returns also under the names of Megatron's three
  schedule functions. A test that asserts which of them it was given goes on to what it tests. That
  the assertion itself holds then says nothing;
- native (with `--native`): Megatron's own, which shows that a failure is not the CPU's.

`inside` runs in a process of its own and imports nothing of this package: there, the package named
`tests` is Megatron's.
"""

"""Runs model-written code where it can do no harm, and judges it where it cannot lie.

Two bubblewrap sandboxes per program, each with its own namespaces, and nothing in the runner's own
process. The guest runs the program and only ever answers calls, with plain values as text. The
checker, which the guest can neither see nor signal, runs the problem's test against a proxy that
sends those calls, and is the only one with a line to the runner. A program passes by answering
right; there is nothing else it could do to pass.
"""

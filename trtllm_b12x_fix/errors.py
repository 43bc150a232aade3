"""Errors a user can meet: one public base class, a few children, each saying what to do next.

Every command maps these to exit code 2 ("input that cannot be used"); a finding in good input is
not an error and ends with exit code 1.
"""

from __future__ import annotations

#: Shown wherever a figure is asked for without matplotlib.
MATPLOTLIB_MISSING = "--plot needs matplotlib: pip install matplotlib"


class B12xFixError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(B12xFixError):
    """Input that cannot be used: wrong dtype, shape, value or file.

    The message names the tensor (and, where it has one, the layer and expert) and repeats the
    caller's shapes.
    """


class ShapeError(InputError):
    """Tensors whose shapes contradict each other."""


class ScaleError(InputError):
    """A scale that no backend can use: missing, NaN, infinite, zero or negative."""


class UnsupportedVersionError(B12xFixError):
    """A version of an upstream package whose contract is not known here."""


class NoExactFormError(B12xFixError):
    """The requested arguments cannot express exact scales on this kernel contract."""


class MissingDependencyError(B12xFixError):
    """An optional package (torch, safetensors, matplotlib) is needed and not importable."""

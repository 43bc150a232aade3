"""One class attribute: replaced once, looked at rather than remembered, put back."""

from __future__ import annotations

import functools
import threading

import pytest

from trtllm_b12x_fix import patching
from trtllm_b12x_fix.errors import UnsupportedVersionError
from trtllm_b12x_fix.patching import (
    MARKER,
    Found,
    Patch,
    PatchConflictError,
    PatchState,
    TargetPlan,
)


def repaired(original):
    def convert(self):
        return f"repaired {original(self)}"

    return convert


@pytest.fixture
def method(monkeypatch):
    """A class of its own for each test, and a ledger of its own."""
    monkeypatch.setattr(patching, "_INSTALLED", {})
    monkeypatch.setattr(patching, "_REMOVED", set())

    class Base:
        def inherited(self):
            return "base"

    class Method(Base):
        def convert(self):
            return "baked"

    return Method


@pytest.fixture
def patch(method):
    return Patch(method, "convert", repaired)


def wrap(method):
    """What another plugin may do."""
    ours = method.convert

    @functools.wraps(ours)
    def other(self):
        return f"other {ours(self)}"

    method.convert = other
    return other


def test_the_class_attribute_itself_is_replaced(method, patch):
    before = method()
    assert patch.state() is PatchState.NOT_INSTALLED
    assert patch.install() is PatchState.ACTIVE
    assert before.convert() == method().convert() == "repaired baked"
    assert getattr(vars(method)["convert"], MARKER)


def test_twice_is_once(method, patch):
    patch.install()
    assert patch.install() is PatchState.ACTIVE
    assert Patch(method, "convert", repaired).install() is PatchState.ACTIVE
    assert method().convert() == "repaired baked"
    assert len(patching.installed()) == 1


def test_undo_puts_back_the_very_original(method, patch):
    original = vars(method)["convert"]
    patch.install()
    assert patch.undo() is PatchState.REMOVED
    assert vars(method)["convert"] is original
    assert patch.undo() is PatchState.REMOVED
    assert patching.installed() == ()
    assert patch.install() is PatchState.ACTIVE
    assert method().convert() == "repaired baked"


def test_what_was_never_installed_is_not_undone(method, patch):
    original = vars(method)["convert"]
    assert patch.undo() is PatchState.NOT_INSTALLED
    assert vars(method)["convert"] is original


def test_a_replacement_by_others_is_seen_and_named(method, patch):
    patch.install()
    method.convert = lambda self: "theirs"
    assert patch.state() is PatchState.REPLACED_BY_OTHERS
    assert "replaced by someone else" in patch.describe()
    assert "<lambda>" in patch.describe()
    assert __name__ in patch.describe()
    with pytest.raises(PatchConflictError, match="replaced by someone else"):
        patch.verify()


def test_what_others_put_there_is_left_alone(method, patch):
    patch.install()
    theirs = method.convert = lambda self: "theirs"
    for act in (patch.undo, patch.install):
        with pytest.raises(PatchConflictError, match="<lambda>"):
            act()
        assert vars(method)["convert"] is theirs


def test_a_wrapper_around_ours_is_told_from_a_replacement(method, patch):
    patch.install()
    wrap(method)
    # functools.wraps copied the marker: it proves nothing.
    assert getattr(vars(method)["convert"], MARKER)
    assert patch.state() is PatchState.WRAPPED
    assert "test_patching.py" in patch.describe()
    assert patch.install() is PatchState.WRAPPED
    assert method().convert() == "other repaired baked"
    with pytest.raises(PatchConflictError, match="wrapped"):
        patch.undo()


def test_a_copied_marker_does_not_make_a_replacement_ours(method, patch):
    patch.install()
    other = wrap(method)
    del other.__wrapped__
    assert getattr(other, MARKER)
    assert patch.state() is PatchState.REPLACED_BY_OTHERS


def test_a_wrapper_that_wraps_itself_ends_the_search(method, patch):
    patch.install()

    def circle(self):
        return None

    circle.__wrapped__ = circle
    method.convert = circle
    assert patch.state() is PatchState.REPLACED_BY_OTHERS


def test_the_original_put_back_by_others_is_no_longer_active(method, patch):
    original = vars(method)["convert"]
    patch.install()
    method.convert = original
    assert patch.state() is PatchState.REPLACED_BY_OTHERS
    assert "the original was put back" in patch.describe()
    assert patch.install() is PatchState.ACTIVE


def test_a_deleted_attribute_is_no_longer_active(method, patch):
    patch.install()
    del method.convert
    assert patch.state() is PatchState.REPLACED_BY_OTHERS
    assert "deleted" in patch.describe()


@pytest.mark.parametrize("name", ["missing", "inherited"])
def test_what_the_class_does_not_define_itself_is_refused(method, name):
    with pytest.raises(UnsupportedVersionError, match=f"Method.{name} does not exist"):
        Patch(method, name, repaired).install()
    assert name not in vars(method)


def test_what_is_not_as_expected_is_refused_with_the_reason(method):
    wrong = Patch(method, "convert", repaired, lambda original: "it takes no scales")
    with pytest.raises(UnsupportedVersionError, match=r"convert is not as known: it takes no"):
        wrong.install()
    assert method().convert() == "baked"
    assert wrong.state() is PatchState.NOT_INSTALLED


def test_the_expectation_sees_the_original(method):
    seen = []
    Patch(method, "convert", repaired, lambda original: seen.append(original)).install()
    assert [function.__name__ for function in seen] == ["convert"]
    assert not hasattr(seen[0], MARKER)


def test_another_copy_of_this_package_is_not_stacked_upon(method, patch, monkeypatch):
    patch.install()
    monkeypatch.setattr(patching, "_INSTALLED", {})  # as a second import of the package has it
    with pytest.raises(PatchConflictError, match="another copy of this package"):
        Patch(method, "convert", repaired).install()
    assert method().convert() == "repaired baked"


def test_what_changes_while_it_is_being_replaced_is_left_alone(method):
    def slow(original):
        method.convert = lambda self: "theirs"
        return repaired(original)

    with pytest.raises(PatchConflictError, match="changed while"):
        Patch(method, "convert", slow).install()
    assert method().convert() == "theirs"


def test_threads_that_install_at_the_same_time_install_once(method):
    all_have_seen_the_original = threading.Barrier(4)
    states = []

    def slow(original):
        all_have_seen_the_original.wait(timeout=30)
        return repaired(original)

    def install():
        states.append(Patch(method, "convert", slow).install())

    threads = [threading.Thread(target=install) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states == [PatchState.ACTIVE] * 4
    assert method().convert() == "repaired baked"


def test_a_plan_without_patches_needs_none():
    assert TargetPlan(note="class absent").patches == ()
    assert dict(TargetPlan().versions) == {}


# ---- what a class inherits


def loud(original):
    return lambda self: f"loud {original(self)}"


@pytest.fixture
def inheriting(method):
    return Patch(method, "inherited", loud, found=Found.ANYWHERE)


def test_an_inherited_attribute_is_replaced_on_the_class_alone(method, inheriting):
    base = method.__mro__[1]
    before = method()
    assert inheriting.install() is inheriting.install() is PatchState.ACTIVE
    assert before.inherited() == "loud base"
    assert base().inherited() == "base"


def test_undoing_it_leaves_the_class_as_it_was(method, inheriting):
    before = dict(vars(method))
    inheriting.install()
    assert inheriting.undo() is inheriting.undo() is PatchState.REMOVED
    assert dict(vars(method)) == before
    assert method().inherited() == "base"
    assert inheriting.install() is PatchState.ACTIVE


def test_an_attribute_that_the_class_has_itself_is_found_first(method):
    patch = Patch(method, "convert", repaired, found=Found.ANYWHERE)
    patch.install()
    assert method().convert() == "repaired baked"
    patch.undo()
    assert method().convert() == "baked"


def test_one_that_was_deleted_meanwhile_is_undone_and_made_anew(method, inheriting):
    inheriting.install()
    del method.inherited
    assert inheriting.state() is PatchState.REPLACED_BY_OTHERS
    assert "the original was put back" in inheriting.describe()
    assert inheriting.install() is PatchState.ACTIVE
    del method.inherited
    assert inheriting.undo() is PatchState.REMOVED


def test_one_that_others_replaced_is_left_alone(method, inheriting):
    inheriting.install()
    method.inherited = lambda self: "theirs"
    with pytest.raises(PatchConflictError, match="<lambda>"):
        inheriting.undo()
    assert method().inherited() == "theirs"


def test_one_that_nobody_defines_is_named(method):
    patch = Patch(method, "no_such", loud, found=Found.ANYWHERE)
    with pytest.raises(UnsupportedVersionError, match="does not define it and inherits none"):
        patch.install()
    assert "no_such" not in vars(method)


def test_a_base_that_another_copy_of_the_package_patched_is_a_conflict(method, inheriting):
    setattr(vars(method.__mro__[1])["inherited"], MARKER, "0.0.9")
    with pytest.raises(PatchConflictError, match="another copy of this package"):
        inheriting.install()
    assert "inherited" not in vars(method)

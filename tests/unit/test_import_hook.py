"""The import hook on real imports of small packages made for each test."""

from __future__ import annotations

import importlib
import importlib.resources
import importlib.util
import inspect
import pickle
import sys
import textwrap
import threading
import time
import zipfile
from importlib.machinery import ModuleSpec, SourceFileLoader

import pytest

from trtllm_b12x_fix.import_hook import PostImportFinder

ROOT = "b12x_hooked"
TARGET = f"{ROOT}.inner.quantization"

SOURCE = """
import importlib.resources
LOADER = __loader__
SPEC_LOADER = __spec__.loader
class Method:
    def convert(self):
        return "baked"
"""


def write(folder, name, source):
    path = folder.joinpath(*name.split("."))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".py").write_text(textwrap.dedent(source), encoding="utf-8")


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == ROOT]:
        del sys.modules[name]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with the target in it, on the path; all traces are removed afterwards."""
    for name in (f"{ROOT}.__init__", f"{ROOT}.inner.__init__"):
        write(tmp_path, name, "")
    write(tmp_path, TARGET, SOURCE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    yield tmp_path
    forget()
    importlib.invalidate_caches()


@pytest.fixture
def calls():
    return []


@pytest.fixture
def finder(package, calls):
    made = PostImportFinder(
        [TARGET, f"{ROOT}.elsewhere"], lambda module, name: calls.append(module)
    )
    yield made
    made.uninstall()


def test_a_later_import_calls_back_once_with_the_finished_module(finder, calls):
    finder.install()
    assert calls == []
    module = importlib.import_module(TARGET)
    importlib.import_module(TARGET)
    assert calls == [module]
    assert module.Method().convert() == "baked"


def test_an_earlier_import_calls_back_at_once_and_once(finder, calls):
    module = importlib.import_module(TARGET)
    finder.install()
    finder.install()
    assert calls == [module]
    assert sys.meta_path.count(finder) == 1


def test_other_modules_do_not_call_back(finder, calls):
    finder.install()
    importlib.import_module(f"{ROOT}.inner")
    assert calls == []


def test_every_reload_calls_back(finder, calls):
    finder.install()
    module = importlib.import_module(TARGET)
    importlib.reload(module)
    importlib.reload(module)
    assert calls == [module] * 3


def test_an_import_after_removal_from_sys_modules_calls_back(finder, calls):
    finder.install()
    first = importlib.import_module(TARGET)
    forget()
    second = importlib.import_module(TARGET)
    assert calls == [first, second]
    assert first is not second


def test_uninstalled_it_calls_nobody_and_is_gone(finder, calls):
    finder.install()
    finder.uninstall()
    finder.uninstall()
    importlib.import_module(TARGET)
    assert calls == []
    assert finder not in sys.meta_path


def test_uninstalled_between_finding_and_loading_it_calls_nobody(finder, calls):
    finder.install()
    spec = importlib.util.find_spec(TARGET)
    finder.uninstall()
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert calls == []


class Broken(Exception):
    pass


def test_a_callback_that_raises_fails_the_import_each_time(package):
    attempts = []

    def fail_twice(module, name):
        attempts.append(module)
        if len(attempts) < 3:
            raise Broken("half way")

    finder = PostImportFinder([TARGET], fail_twice)
    finder.install()
    for _ in range(2):
        with pytest.raises(Broken, match="half way"):
            importlib.import_module(TARGET)
        assert TARGET not in sys.modules
        assert not hasattr(sys.modules[f"{ROOT}.inner"], "quantization")
    module = importlib.import_module(TARGET)
    assert attempts[2] is module
    finder.uninstall()


def test_a_module_that_raises_itself_calls_nobody(package, finder, calls):
    write(package, TARGET, "raise ZeroDivisionError")
    finder.install()
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(TARGET)
    assert calls == []
    write(package, TARGET, SOURCE)
    importlib.invalidate_caches()
    importlib.import_module(TARGET)
    assert len(calls) == 1


def test_a_missing_module_is_as_missing_as_before(finder, calls):
    finder.install()
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(f"{ROOT}.elsewhere")
    assert caught.value.name == f"{ROOT}.elsewhere"
    assert calls == []


def test_loader_source_resources_and_pickle_are_the_originals(package, finder, calls):
    (package / ROOT / "inner" / "data.txt").write_text("data", encoding="utf-8")
    finder.install()
    module = importlib.import_module(TARGET)
    assert type(module.__loader__) is SourceFileLoader
    assert module.__spec__.loader is module.__loader__
    # The module's own code never saw another one, either.
    assert module.LOADER is module.SPEC_LOADER is module.__loader__
    assert module.__loader__.name == TARGET
    assert "baked" in inspect.getsource(module.Method)
    assert "baked" in module.__loader__.get_source(TARGET)
    assert module.__loader__.is_package(TARGET) is False
    assert pickle.loads(pickle.dumps(module.Method)) is module.Method
    assert importlib.resources.files(f"{ROOT}.inner").joinpath("data.txt").read_text() == "data"


def test_a_target_that_is_a_package_keeps_its_path_and_resources(package, calls):
    (package / ROOT / "inner" / "data.txt").write_text("data", encoding="utf-8")
    finder = PostImportFinder([f"{ROOT}.inner"], lambda module, name: calls.append(module))
    finder.install()
    module = importlib.import_module(f"{ROOT}.inner")
    assert calls == [module]
    assert importlib.resources.files(module).joinpath("data.txt").read_text() == "data"
    assert importlib.import_module(TARGET)
    finder.uninstall()


def test_a_spec_that_is_only_looked_at_answers_like_the_original(finder, calls):
    finder.install()
    spec = importlib.util.find_spec(TARGET)
    assert spec.origin.endswith("quantization.py")
    assert "baked" in spec.loader.get_source(TARGET)
    assert spec.loader.is_package(TARGET) is False
    assert "Method" in spec.loader.get_code(TARGET).co_names
    with pytest.raises(AttributeError):
        spec.loader.no_such_thing  # noqa: B018
    assert calls == []


def test_a_half_made_copy_of_the_loader_does_not_recurse(finder):
    finder.install()
    loader = importlib.util.find_spec(TARGET).loader
    with pytest.raises(AttributeError):
        type(loader).__new__(type(loader)).anything  # noqa: B018


def test_below_a_namespace_package(package, finder, calls):
    for name in (f"{ROOT}/__init__.py", f"{ROOT}/inner/__init__.py"):
        (package / name).unlink()
    importlib.invalidate_caches()
    finder.install()
    module = importlib.import_module(TARGET)
    assert calls == [module]


def test_a_namespace_package_itself_is_left_alone(package, calls):
    (package / ROOT / "inner" / "__init__.py").unlink()
    importlib.invalidate_caches()
    finder = PostImportFinder([f"{ROOT}.inner"], lambda module, name: calls.append(module))
    finder.install()
    module = importlib.import_module(f"{ROOT}.inner")
    assert "Namespace" in type(module.__loader__).__name__
    assert calls == []
    finder.uninstall()


def test_from_a_zip_file(package, finder, calls, monkeypatch, tmp_path_factory):
    archive = tmp_path_factory.mktemp("zip") / "package.zip"
    with zipfile.ZipFile(archive, "w") as written:
        for path in package.rglob("*.py"):
            written.write(path, path.relative_to(package))
    monkeypatch.setattr(sys, "path", [str(archive), *sys.path[1:]])
    finder.install()
    module = importlib.import_module(TARGET)
    assert calls == [module]
    assert type(module.__loader__).__name__ == "zipimporter"
    assert "baked" in inspect.getsource(module.Method)


def test_a_loader_of_the_old_protocol(package, finder, calls):
    class Old:
        def load_module(self, name):
            module = sys.modules[name]
            module.old = True
            return module

    class OldFinder:
        def find_spec(self, name, path=None, target=None):
            return ModuleSpec(name, Old()) if name == TARGET else None

    sys.meta_path.insert(0, OldFinder())
    finder.install()
    module = importlib.import_module(TARGET)
    assert module.old
    assert calls == [module]
    assert type(module.__loader__) is Old


def test_a_module_that_replaces_itself(package, finder, calls):
    write(package, TARGET, "import sys, types; sys.modules[__name__] = types.ModuleType('other')")
    finder.install()
    importlib.import_module(TARGET)
    assert [module.__name__ for module in calls] == ["other"]


def test_many_threads_see_one_callback_and_only_finished_modules(package):
    calls, seen = [], []

    def slow(module, name):
        calls.append(module)
        time.sleep(0.05)
        module.patched = True

    finder = PostImportFinder([TARGET], slow)
    finder.install()
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        seen.append(importlib.import_module(TARGET).patched)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert seen == [True] * 8
    finder.uninstall()


def test_installed_while_another_thread_imports_it_waits_for_the_end(package, finder, calls):
    write(package, TARGET, "import time\nSTARTED = True\ntime.sleep(0.3)\nFINISHED = True\n")
    thread = threading.Thread(target=importlib.import_module, args=(TARGET,))
    thread.start()
    while not hasattr(sys.modules.get(TARGET), "STARTED"):
        time.sleep(0.001)
    finder.install()
    assert [hasattr(module, "FINISHED") for module in calls] == [True]
    thread.join()
    assert len(calls) == 1


def test_installed_by_the_import_itself_is_refused(package, finder, calls, monkeypatch):
    write(package, TARGET, "import sys\nsys.modules['b12x_test_finder'].install()")
    monkeypatch.setitem(sys.modules, "b12x_test_finder", finder)
    with pytest.raises(RuntimeError, match="is being imported by the caller"):
        importlib.import_module(TARGET)
    assert calls == []


class Passive:
    """Another package's finder: remembers what it was asked for, finds nothing."""

    def __init__(self):
        self.asked = []

    def find_spec(self, name, path=None, target=None):
        self.asked.append(name)


def test_other_finders_keep_their_order_and_are_all_asked(finder, calls):
    before, between, last = Passive(), Passive(), Passive()
    sys.meta_path.insert(0, between)
    sys.meta_path.append(last)
    finder.install()
    sys.meta_path.insert(0, before)
    others = [one for one in sys.meta_path if one is not finder]
    importlib.import_module(TARGET)
    assert len(calls) == 1
    assert [one for one in sys.meta_path if one is not finder] == others
    assert TARGET in before.asked
    assert TARGET in between.asked


def test_a_finder_that_came_later_and_answers_first_does_not_hide_the_target(finder, calls):
    class Redirect:
        """As some editable installs do it."""

        def find_spec(self, name, path=None, target=None):
            if name != TARGET:
                return None
            return sys.modules["importlib"].machinery.PathFinder.find_spec(name, path)

    finder.install()
    sys.meta_path.insert(0, Redirect())
    assert importlib.import_module(TARGET) in calls


def test_another_hook_that_asks_all_finders_again(finder, calls):
    class Nosy:
        """As wrapt does it."""

        busy = False

        def find_spec(self, name, path=None, target=None):
            if self.busy or name != TARGET:
                return None
            self.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False

    for position in (0, 1):
        forget()
        calls.clear()
        sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != "Nosy"]
        finder.uninstall()
        finder.install()
        sys.meta_path.insert(position, Nosy())
        module = importlib.import_module(TARGET)
        assert calls == [module]
        assert type(module.__loader__) is SourceFileLoader


def test_two_finders_for_one_target_are_both_called(finder, calls):
    """As two copies of this package would have it."""
    more = []
    other = PostImportFinder([TARGET], lambda module, name: more.append(module))
    finder.install()
    other.install()
    module = importlib.import_module(TARGET)
    importlib.reload(module)
    assert calls == more == [module, module]
    assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader
    other.uninstall()


def test_a_finder_that_keeps_its_specs_does_not_stack_loaders(package, finder, calls):
    kept = importlib.util.spec_from_file_location(
        TARGET, package.joinpath(*TARGET.split(".")).with_suffix(".py")
    )

    class Keeping:
        def find_spec(self, name, path=None, target=None):
            return kept if name == TARGET else None

    sys.meta_path.insert(0, Keeping())
    finder.install()
    importlib.util.find_spec(TARGET)
    importlib.util.find_spec(TARGET)
    module = importlib.import_module(TARGET)
    assert calls == [module]
    assert type(module.__loader__) is SourceFileLoader


# ---- a finder that arrives between the target's package and the target


class Greedy:
    """Answers for the target as the path would, from before our place."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, fullname, path=None, target=None):
        if fullname != TARGET:
            return None
        return importlib.machinery.PathFinder.find_spec(fullname, path, target)


@pytest.fixture
def greedy(finder):
    """The hook waits, the package is imported, and then somebody stands before the hook."""
    finder.install()
    importlib.import_module(f"{ROOT}.inner")
    sys.meta_path.insert(0, Greedy(finder))
    return finder


def test_a_target_that_a_later_finder_answered_for_is_noticed_by_the_next_import(
    greedy, calls, package
):
    for name in ("next", "after"):
        write(package, f"{ROOT}.{name}", "")
    module = importlib.import_module(TARGET)
    assert calls == []
    importlib.import_module(f"{ROOT}.next")
    assert calls == [module]
    importlib.import_module(f"{ROOT}.after")
    importlib.import_module(TARGET)
    assert calls == [module]


def test_one_that_fails_then_fails_one_import_and_no_more(greedy, calls, package, monkeypatch):
    for name in ("next", "after"):
        write(package, f"{ROOT}.{name}", "")
    importlib.import_module(TARGET)

    def fail(module, name):
        calls.append(module)
        raise LookupError("FlashInfer 9 is not known")

    monkeypatch.setattr(greedy, "_callback", fail)
    with pytest.raises(LookupError):
        importlib.import_module(f"{ROOT}.next")
    importlib.import_module(f"{ROOT}.after")
    assert len(calls) == 1


def test_one_that_another_thread_is_still_importing_is_left_to_it(greedy, calls, package):
    write(package, TARGET, SOURCE + f"import {ROOT}.beside\n")
    write(package, f"{ROOT}.beside", "")
    write(package, f"{ROOT}.next", "")
    importlib.invalidate_caches()
    module = importlib.import_module(TARGET)
    assert calls == []  # the import in its middle came too early
    importlib.import_module(f"{ROOT}.next")
    assert calls == [module]


def test_after_uninstall_nothing_is_noticed(greedy, calls, package):
    write(package, f"{ROOT}.next", "")
    importlib.import_module(TARGET)
    greedy.uninstall()
    importlib.import_module(f"{ROOT}.next")
    assert calls == []


def test_without_that_look_it_would_be_missed(greedy, calls, package, monkeypatch):
    """The planted defect of the tests above."""
    write(package, f"{ROOT}.next", "")
    monkeypatch.setattr(PostImportFinder, "_notice_missed", lambda self: None)
    importlib.import_module(TARGET)
    importlib.import_module(f"{ROOT}.next")
    assert calls == []

"""The process of one command: Ctrl-C ends it at any moment, and heavy packages are imported at
their first use.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, NoReturn

from kvstore.cli.early import end_at_once

# --------------------------------------------------------------------------------------------------
# Ctrl-C ends a command at any moment, with exit code 130 and without a traceback.
#
# A command runs in three phases:
#
#     loading     modules are imported, arguments parsed      an interrupt ends the process at once
#     running     the function of the command                 an interrupt raises KeyboardInterrupt
#     ending      its output is flushed, the process exits    an interrupt ends the process at once
#
# Invariants
# 1. Nothing is open before and after the running phase, so the process may end there at once.
# 2. The running phase unwinds: stores are closed, temporary files removed. A second interrupt
#    raises again, and cuts that unwinding short.
# 3. An error behind an interrupt is taken for its consequence: a package whose import the interrupt
#    broke off raises another error when it is used.
# 4. A process that was started to ignore interrupts (`nohup`) ignores them in all phases.
# 5. Steps that must not be cut in two keep an interrupt until they are over: see `uninterrupted`.

_is_watching = False
_has_come = False


def watch() -> None:
    """Begin the loading phase of a process that runs one command."""
    global _is_watching
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, end_at_once):
        _is_watching = True
        signal.signal(signal.SIGINT, end_at_once)
        sys.unraisablehook = _repeated


def interruptible(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` as the running phase. Outside a watched process it is `run` itself, in effect."""

    @wraps(run)
    def running(*args: Any, **options: Any) -> Any:
        gc.enable()  # see `start`
        if not _is_watching:
            return run(*args, **options)
        try:
            signal.signal(signal.SIGINT, _raise)
            return run(*args, **options)
        except Exception as error:
            from typer import Exit  # the command has imported it

            if _has_come and not isinstance(error, Exit):
                raise KeyboardInterrupt from None
            raise
        finally:
            # The server has handlers of its own, and puts ours back.
            signal.signal(signal.SIGINT, end_at_once)

    return running


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep an interrupt until the block has ended. Python gives signals to its first thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _raise(*_: object) -> NoReturn:
    global _has_come
    _has_come = True
    raise KeyboardInterrupt


def _repeated(failure: Any) -> None:
    """Interrupt again where the interpreter had to drop an interrupt, in a finalizer, say."""
    if failure.exc_type is not None and issubclass(failure.exc_type, KeyboardInterrupt):
        # In a thread: here the handler could run inside this hook, and would be dropped as well.
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT), daemon=True).start()
    else:
        sys.__unraisablehook__(failure)


# --------------------------------------------------------------------------------------------------
# Heavy packages that a command imports when it first uses them: numpy and Arrow.
#
# Importing them takes 150 ms, most of the time of `kvstore get`, which uses neither. The modules of
# the store import them as they import all others. So a process that runs one command first puts
# placeholders into `sys.modules`. A placeholder becomes the module when one of its names is looked
# up.
#
# Invariants
# 1. After that look-up `sys.modules` has the module itself, and the placeholder has all its names.
# 2. An interrupt waits until an import is over: numpy cannot be imported twice in one process.

DEFERRED: Final = ("numpy", "numpy.typing", "pyarrow", "pyarrow.compute")

_LOCK: Final = threading.RLock()


class Placeholder(ModuleType):
    """Stands for a module that nobody has used yet."""

    def __getattr__(self, name: str) -> Any:
        own = self.__name__
        with _LOCK, uninterrupted():
            package = own.partition(".")[0]
            for each in DEFERRED:
                if each.partition(".")[0] == package and isinstance(
                    sys.modules.get(each), Placeholder
                ):
                    del sys.modules[each]
            module = importlib.import_module(own)
        vars(self).update(vars(module))
        return getattr(module, name)


def defer_imports() -> None:
    """Put placeholders where the modules of `DEFERRED` would be, unless they are imported."""
    for name in DEFERRED:
        package, _, member = name.partition(".")
        if name in sys.modules or (member and not isinstance(sys.modules[package], Placeholder)):
            continue
        placeholder = Placeholder(name)
        placeholder.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = placeholder
        if member:
            setattr(sys.modules[package], member, placeholder)

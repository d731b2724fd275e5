"""Runs the scenarios: starts the engines of each layout once, and the scenarios of this layout one after the other in front of them.

    python run.py FOLDER RUN TANDEM [NAME...]

A scenario is a file in `scenarios/`: its docstring says what must hold, LAYOUT (see engines.py) has the engines that it needs, and
`scenario(stage)` raises an error when something does not hold. A scenario
with CHANGES_ENGINES comes last, because the others need engines as they were started.
"""

import importlib
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from engines import EngineFailed, Engines


@dataclass(frozen=True)
class Stage:
    """The input of a scenario: the engines by name, Tandem's binary, and the scenario's own folder for logs."""

    engines: Engines
    tandem: Path
    folder: Path


def load(names):
    known = sorted(path.stem for path in Path(__file__).with_name("scenarios").glob("*.py"))
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"ci/vllm.sh: there is no scenario {unknown[0]}; the scenarios are {', '.join(known)}")
    modules = {name: importlib.import_module(f"scenarios.{name}") for name in names or known}
    return dict(sorted(modules.items(), key=lambda item: hasattr(item[1], "CHANGES_ENGINES")))


def play(name, module, engines, tandem, run):
    folder = run / name
    folder.mkdir()
    print(f"\n== {name}: {module.__doc__.splitlines()[0]}", flush=True)
    started, failed = time.monotonic(), False
    try:
        module.scenario(Stage(engines, tandem, folder))
    except Exception:
        traceback.print_exc()
        failed = True
    print(f"{'FAILED' if failed else 'ok'} after {time.monotonic() - started:.1f} s; logs in {folder}", flush=True)
    return failed


def main(folder, run, tandem, *names):
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    run, tandem, modules = Path(run), Path(tandem).absolute(), load(names)
    failed = []
    for number, layout in enumerate({module.LAYOUT: None for module in modules.values()}):
        of_layout = {name: module for name, module in modules.items() if module.LAYOUT == layout}
        try:
            with Engines(layout, folder, run / f"engines-{number}") as engines:
                failed += [name for name, module in of_layout.items() if play(name, module, engines, tandem, run)]
        except EngineFailed as error:
            print(f"ci/vllm.sh: {error}", file=sys.stderr)
            failed += of_layout
    print(f"\n{len(modules) - len(failed)} of {len(modules)} scenarios passed{'; failed: ' + ', '.join(failed) if failed else ''}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])

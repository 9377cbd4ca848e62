"""Show a machine profile, which the planner uses, and this computer, or measure this computer.

Other commands take a measured profile as --machine FILE.json. Run nothing else while measuring. GPU and
link are measured if there is an NVIDIA GPU, otherwise taken from another profile. The network between
computers is measured under mpiexec, with --ranks mpi.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from hybridc.cli.support.arguments import add_json, add_quiet, add_threads
from hybridc.cli.support.files import print_json, written_whole
from hybridc.cli.support.hardware import Computer, this_computer
from hybridc.cli.support.terminal import output_width, print_text
from hybridc.errors import UsageError
from hybridc.options import DEFAULT_NET_TIMEOUT_SECONDS, format_bytes
from hybridc.progress import terminal_progress
from hybridc.targets import parse_target

if TYPE_CHECKING:
    from hybridc.machine import Machine, Network, Processor

HELP = "show a machine profile, or measure this computer"
EXAMPLE = """\
  hybridc machine show laptop-4gb
  hybridc machine calibrate -o mine.json
  mpiexec -n 2 hybridc machine calibrate -o mine.json --ranks mpi"""
_UNNAMED = "this-computer"
_WIDTH = 90
"""Of a paragraph where the terminal is no narrower: longer lines are hard to read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="the profile, and this computer", allow_abbrev=False)
    show.add_argument(
        "name",
        nargs="?",
        metavar="NAME|FILE.json",
        help="a profile (default: the one that plans use by default)",
    )
    add_json(show)
    calibrate = actions.add_parser(
        "calibrate", help="measure this computer, in less than a minute", allow_abbrev=False
    )
    calibrate.add_argument("-o", "--output", type=Path, metavar="FILE.json", help="profile to write")
    calibrate.add_argument(
        "--target",
        default="cuda+native",
        metavar="TARGET",
        help="target that kernels are compiled for, as in `hybridc compile` (default: %(default)s)",
    )
    add_threads(calibrate)
    calibrate.add_argument(
        "--gpu-from",
        metavar="NAME|FILE.json",
        help="measure only the CPU, and take GPU and link from this profile",
    )
    calibrate.add_argument(
        "--ranks",
        choices=["mpi"],
        help="also measure the network between all ranks of mpiexec (needs hybridc[mpi])",
    )
    add_quiet(calibrate)
    add_json(calibrate)


def execute(arguments: argparse.Namespace) -> int:
    if arguments.action != "calibrate":
        return _show(arguments)
    if arguments.ranks is None:
        return _calibrate(arguments, None)
    from hybridc.cli.support.mpi import started_ranks
    from hybridc.training.ranks.measure import measure_network

    with started_ranks(DEFAULT_NET_TIMEOUT_SECONDS) as ranks:
        if ranks.count == 1:
            what = "there is no network to measure between less than two ranks"
            raise UsageError("HC500", what, remedy="start at least two: mpiexec -n 2, on two computers")
        network = measure_network(ranks)
        return ranks.together(lambda: _calibrate(arguments, network) if ranks.rank == 0 else 0)


def _show(arguments: argparse.Namespace) -> int:
    from hybridc.machine import load_machine, machine_names, machine_to_json

    machine = load_machine(arguments.name) if arguments.name else load_machine()
    computer, names = this_computer(), machine_names()
    if arguments.json:
        print_json(
            {
                "profile": machine_to_json(machine),
                "profiles": list(names),
                "computer": dataclasses.asdict(computer),
            }
        )
    else:
        print_text(
            "\n".join(
                [
                    *_profile_lines(machine),
                    *_efficiency_lines(machine),
                    *textwrap.wrap(f"Profiles: {', '.join(names)}", _width(), subsequent_indent=" " * 10),
                    "",
                    *_computer_lines(computer),
                ]
            )
        )
    return 0


def _calibrate(arguments: argparse.Namespace, network: Network | None) -> int:
    from hybridc.machine import load_machine, machine_to_json

    output: Path | None = arguments.output
    if output is not None and output.suffix != ".json":
        remedy = f"use {output}.json: --machine recognises files by this suffix"
        raise UsageError(
            "HC500", "the file name of a profile must end in .json", where=str(output), remedy=remedy
        )
    target = parse_target(arguments.target)
    gpu_from = load_machine(arguments.gpu_from) if arguments.gpu_from else None
    from hybridc.calibrate.measure import calibrate

    computer = this_computer()
    threads = arguments.threads or computer.cores
    cpu = f"{computer.cpu} ({target.isa.name}, {threads} threads)"
    name = output.stem if output is not None else _UNNAMED
    with terminal_progress(quiet=arguments.quiet) as progress:
        machine = calibrate(name, target, threads, cpu, computer.memory_bytes, gpu_from, progress)
    machine = dataclasses.replace(machine, network=network)
    if output is not None:
        with written_whole(output) as whole:
            whole.write_text(json.dumps(machine_to_json(machine), indent=2) + "\n")
    if arguments.json:
        print_json(machine_to_json(machine))
    else:
        print_text("\n".join([*_profile_lines(machine), *_efficiency_lines(machine)]))
        if output is not None:
            print(f"Written to {output}; use it with --machine {output}")
    return 0


def _efficiency_lines(machine: Machine) -> list[str]:
    """What kernels of each family reach, where that was measured."""
    lines = []
    for device, processor in (("GPU", machine.gpu), ("CPU", machine.cpu)):
        for family, reached in processor.efficiencies.items():
            shares = f"{reached.compute:.0%} of the peak, {reached.memory:.0%} of the bandwidth"
            lines.append(f"  {device}   {family}: {shares}")
    return lines


def _width() -> int:
    return min(output_width() or _WIDTH, _WIDTH)


def _profile_lines(machine: Machine) -> list[str]:
    link = machine.link
    speeds = f"{link.h2d_gb_s:g} GB/s to the GPU, {link.d2h_gb_s:g} GB/s back, {link.latency_us:g} us a copy"
    if link.both_directions < 1:
        speeds += f"; both at once {link.both_directions:.0%} of that"
    lines = [
        f"Profile {machine.name}",
        f"  GPU   {_processor_text(machine.gpu)}",
        f"  CPU   {_processor_text(machine.cpu)}",
        f"  link  {speeds}",
    ]
    if machine.network is not None:
        lines.append(f"  net   {machine.network.gb_s:g} GB/s, {machine.network.latency_us:g} us a message")
    return lines + textwrap.wrap(
        machine.source, _width(), initial_indent="  from  ", subsequent_indent=" " * 8
    )


def _processor_text(processor: Processor) -> str:
    shared = "" if processor.shared_gb_s is None else f" ({processor.shared_gb_s:g} beside copies)"
    return (
        f"{processor.name}: {processor.peak_gflops:,.0f} GFLOP/s, {processor.bandwidth_gb_s:g} GB/s{shared},"
        f" {processor.launch_us:g} us a launch, {format_bytes(processor.memory_bytes)}"
    )


def _computer_lines(computer: Computer) -> list[str]:
    driver = f"NVIDIA driver {computer.nvidia_driver}" if computer.nvidia_driver else "no NVIDIA driver"
    return [
        "This computer",
        f"  CPU   {computer.cpu}, {computer.cores} cores, {format_bytes(computer.memory_bytes)}",
        f"  runs  {', '.join(computer.isas) or 'no instruction set that hybridc compiles for'}",
        f"  GPU   {driver}" + ("" if computer.nvidia_driver else "; `hybridc run --emulate-gpu` needs none"),
    ]

"""Show a machine profile, which the planner reckons with, and what this computer has."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from typing import TYPE_CHECKING

from hybridc.cli.arguments import add_json
from hybridc.cli.files import print_json
from hybridc.cli.hardware import Computer, this_computer
from hybridc.options import format_bytes

if TYPE_CHECKING:
    from hybridc.machine import Machine, Processor

HELP = "show a machine profile and this computer"
EXAMPLE = "  hybridc machine show laptop-4gb"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="the profile, and this computer", allow_abbrev=False)
    show.add_argument(
        "name", nargs="?", metavar="NAME|FILE.json", help="a profile (default: the one plans are made for)"
    )
    add_json(show)


def execute(arguments: argparse.Namespace) -> int:
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
        print(
            "\n".join(
                [*_profile_lines(machine), f"Profiles: {', '.join(names)}", "", *_computer_lines(computer)]
            )
        )
    return 0


def _profile_lines(machine: Machine) -> list[str]:
    link = machine.link
    speeds = f"{link.h2d_gb_s:g} GB/s to the GPU, {link.d2h_gb_s:g} GB/s back, {link.latency_us:g} us a copy"
    lines = [
        f"Profile {machine.name}",
        f"  GPU   {_processor_text(machine.gpu)}",
        f"  CPU   {_processor_text(machine.cpu)}",
        f"  link  {speeds}",
    ]
    return lines + textwrap.wrap(machine.source, 90, initial_indent="  from  ", subsequent_indent=" " * 8)


def _processor_text(processor: Processor) -> str:
    return (
        f"{processor.name}: {processor.peak_gflops:,.0f} GFLOP/s, {processor.bandwidth_gb_s:g} GB/s,"
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

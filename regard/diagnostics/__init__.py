"""Diagnostics: what a bug report needs to know about a machine, and checks of it."""

from regard.diagnostics.machine_report import MachineCheck, MachineReport, doctor

__all__ = ["MachineCheck", "MachineReport", "doctor"]

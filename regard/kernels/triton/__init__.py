"""Triton sources only. They are imported when a kernel is launched, because Triton is optional.

They have a package separate from their launchers because runtime shape checking, used in tests, wraps functions, and
Triton compiles functions from their source.
"""

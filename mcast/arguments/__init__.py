"""Validation of arguments, shared by all calls: types, numbers, times, buffers, file objects."""

"""What programs hand in, judged in one place for all calls: types, numbers, times, buffers, file objects."""

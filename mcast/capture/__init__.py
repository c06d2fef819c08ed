"""Record the messages that an endpoint receives to a capture file, and send those of such a file again.

    with open("group.pcapng", "wb") as file:
        recorder = make_recorder(endpoint, file)  # after joining
        for batch in endpoint.batches(timeout=5.0):
            recorder.take(batch, time.time_ns())

`recorder.make_recorder` makes the recorder of an endpoint. `replay.summarize` reads a file without sending
anything, and `replay` sends its messages again.
"""

"""Record the messages that an endpoint receives to a capture file, and send those of such a file again.

    with open("group.pcapng", "wb") as file:
        recorder = recorder_of(endpoint, file)  # after joining
        for batch in endpoint.batches(timeout=5.0):
            recorder.take(batch, time.time_ns())

`recorder.recorder_of` makes the recorder of an endpoint. `player.contents_of` reads a file without sending
anything, and `player.play` sends its messages again.
"""

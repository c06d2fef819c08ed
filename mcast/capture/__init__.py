"""Recording what an endpoint hears to a capture file, and sending the messages of one again."""

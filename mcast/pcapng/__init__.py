"""Capture files: pcapng out, pcapng and pcap in, and from captured bytes back to messages."""

"""Capture files: writes pcapng, reads pcapng and pcap, and finds messages in captured packets."""

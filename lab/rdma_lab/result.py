"""The result of a run in the guest."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LabResult:
    """Result of a run in the guest."""

    exit_code: int
    """The command's exit code; 128 + n if signal n ended the command."""
    kernel: str
    """Release of the guest's kernel."""
    kvm: bool
    """True if the guest ran under KVM, False if it was emulated."""
    ready_after: float
    """Seconds from the call until the fabric stood and the command was started; infinite if it never was."""
    seconds: float
    """Seconds of the whole call."""
    resumed: bool = False
    """True if the guest was resumed from a snapshot of an earlier run."""

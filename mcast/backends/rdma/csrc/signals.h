/* Python's signal handlers run in its main thread, whichever thread the signal comes to. While the main thread sleeps
 * here, Python writes the signal to a pipe of ours (signal.set_wakeup_fd) that the sleep watches. */
#ifndef MCAST_SIGNALS_H
#define MCAST_SIGNALS_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

struct signal_watch {
	int fd;	    /* readable once a signal came; NO_FD in other threads, where no handler runs */
	int before; /* where Python wrote signals until now */
};

/* 0, or -1 with an error: `set_wakeup_fd` is that of Python's module signal, and the ident of its main thread. */
int mcast_set_up_signals(PyObject *set_wakeup_fd, unsigned long main_thread);

/* Both with the GIL; no Python code runs in them. Look for signals that came before once the watch has begun. */
struct signal_watch mcast_watch_signals(void);
void mcast_forget_signals(struct signal_watch watch);

/* In the child of a fork. */
void mcast_signals_after_fork(void);

/* After Python's handlers have run: if one of them has waited, the next sleep ends at once with -EINTR. */
void mcast_wake_if_missed(void);

#endif

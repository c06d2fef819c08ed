/* Python's signal handlers run in its main thread, whichever thread the signal comes to. While the main thread sleeps
 * here, Python writes the signal to a pipe of mcast's (signal.set_wakeup_fd) that the sleep watches. */
#ifndef MCAST_SIGNALS_H
#define MCAST_SIGNALS_H

#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#if !defined(Py_LIMITED_API) && !defined(Py_GIL_DISABLED)
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include "../wait.h"

enum { RAISED = -100000 }; /* no errno: a Python exception */

/* 0, or -1 with an error: `set_wakeup_fd` is that of Python's module signal, and the ident of its main thread. */
int mcast_set_up_signals(PyObject *set_wakeup_fd, unsigned long main_thread);

/* A wait of whichever kind, on an object whose close makes it end with -EBADF. */
typedef int wait_step(void *object, void *what, const struct mcast_wait *wait);

/* Carry the wait out without the GIL. Instead of -EINTR Python's signal handlers run: RAISED if one raises. */
int mcast_wait_with_signals(wait_step *step, void *object, void *what, int event_fd, int64_t deadline, int64_t spin);

/* Return how many forks lie between the process that loaded this and this one. */
extern unsigned mcast_forks;

/* In the child of a fork. */
void mcast_signals_after_fork(void);

#endif

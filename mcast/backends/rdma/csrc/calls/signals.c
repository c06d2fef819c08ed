/* Sleeps that end when a signal comes: signals.h says how. */
#include "signals.h"

#include <fcntl.h>
#include <unistd.h>

static PyObject *set_wakeup_fd, *quietly;
static unsigned long main_thread;
static int from_fd = NO_FD, to_fd = NO_FD;

unsigned mcast_forks;

/* A signal handler may wait, too: a watch within a watch. */
static int listener = NO_FD;  /* Python's wakeup fd before the outermost one */
static int depth;	      /* number of them */
static int missed_at;	      /* one of this depth, and those around it, would have been woken by what another has read */

int mcast_set_up_signals(PyObject *function, unsigned long thread)
{
	main_thread = thread;
	set_wakeup_fd = Py_NewRef(function);
	quietly = PyDict_New();
	return quietly ? PyDict_SetItemString(quietly, "warn_on_full_buffer", Py_False) : -1;
}

/* The descriptor before; NO_FD as well if Python refuses, as it does in the main thread of another interpreter. What a
 * signal's handler has raised by then stays set. */
static int swap(int fd)
{
	PyObject *type, *value, *trace, *arguments, *before;
	long number;

	PyErr_Fetch(&type, &value, &trace);
	arguments = Py_BuildValue("(i)", fd);
	before = arguments ? PyObject_Call(set_wakeup_fd, arguments, quietly) : NULL;
	number = before ? PyLong_AsLong(before) : NO_FD;
	if (!before)
		PyErr_Clear();
	Py_XDECREF(arguments);
	Py_XDECREF(before);
	PyErr_Restore(type, value, trace);
	return (int)number;
}

static int open_pipe(void)
{
	int ends[2];

	if (from_fd >= 0)
		return 0;
	if (pipe2(ends, O_CLOEXEC | O_NONBLOCK))
		return -errno;
	from_fd = ends[0];
	to_fd = ends[1];
	return 0;
}

struct signal_watch {
	int fd;	    /* readable once a signal came; NO_FD in other threads, where no handler runs */
	int before; /* where Python wrote signals until now */
};

/* These two with the GIL; no Python code runs in them. */
static struct signal_watch watch_signals(void)
{
	struct signal_watch watch = { NO_FD, NO_FD };

	if (PyThread_get_thread_ident() != main_thread || open_pipe())
		return watch;
	watch.before = swap(to_fd);
	if (!depth++)
		listener = watch.before;
	watch.fd = from_fd;
	return watch;
}

/* After Python's handlers have run: if one of them has waited, the next sleep ends at once with -EINTR. */
static void wake_if_missed(void)
{
	if (!depth || missed_at < depth)
		return;
	(void)!write(to_fd, "", 1); /* no number of a signal, and passed over as such */
	missed_at = depth - 1;
}

static void forget_signals(struct signal_watch watch)
{
	char numbers[64];
	ssize_t count;

	if (watch.fd < 0)
		return;
	swap(watch.before);
	if (watch.fd != from_fd)
		return; /* a fork came in between */
	depth--;
	do {
		count = read(watch.fd, numbers, sizeof(numbers));
		if (count > 0 && listener >= 0)
			(void)!write(listener, numbers, (size_t)count); /* the program's own listener gets the signals, too */
		if (count > 0 && missed_at < depth)
			missed_at = depth;
	} while (count == sizeof(numbers));
}

int mcast_wait_with_signals(wait_step *step, void *object, void *what, int event_fd, int64_t deadline, int64_t spin)
{
	unsigned here = mcast_forks;
	int result;

	do {
		struct signal_watch watch = watch_signals(); /* before the look at those that came until now */
		struct mcast_wait wait = { .event_fd = event_fd, .signal_fd = watch.fd, .deadline = deadline,
					   .spin_until = spin };

		result = PyErr_CheckSignals() ? RAISED : here != mcast_forks ? -EBADF : 0;
		if (watch.fd >= 0)
			wake_if_missed();
		if (!result) {
			Py_BEGIN_ALLOW_THREADS
			result = step(object, what, &wait);
			Py_END_ALLOW_THREADS
		}
		forget_signals(watch);
		if (result == -EINTR && PyErr_CheckSignals())
			result = RAISED;
	} while (result == -EINTR);
	return result;
}

/* The pipe is the parent's, who may be asleep on it. */
void mcast_signals_after_fork(void)
{
	mcast_forks++;
	main_thread = PyThread_get_thread_ident();
	if (from_fd >= 0) {
		close(from_fd);
		close(to_fd);
	}
	from_fd = to_fd = listener = NO_FD;
	depth = missed_at = 0;
}

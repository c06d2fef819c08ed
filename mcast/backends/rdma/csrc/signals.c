#include "signals.h"

#include "wait.h"

#include <fcntl.h>
#include <unistd.h>

static PyObject *set_wakeup_fd, *quietly;
static unsigned long main_thread;
static int from_fd = NO_FD, to_fd = NO_FD;

int mcast_set_up_signals(PyObject *function, unsigned long thread)
{
	main_thread = thread;
	set_wakeup_fd = Py_NewRef(function);
	quietly = PyDict_New();
	return quietly ? PyDict_SetItemString(quietly, "warn_on_full_buffer", Py_False) : -1;
}

/* What it was before; NO_FD as well if Python refuses, as it does in the main thread of another interpreter. */
static int swap(int fd)
{
	PyObject *arguments = Py_BuildValue("(i)", fd);
	PyObject *before = arguments ? PyObject_Call(set_wakeup_fd, arguments, quietly) : NULL;
	long number = before ? PyLong_AsLong(before) : NO_FD;

	if (!before)
		PyErr_Clear();
	Py_XDECREF(arguments);
	Py_XDECREF(before);
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

struct signal_watch mcast_watch_signals(void)
{
	struct signal_watch watch = { NO_FD, NO_FD };

	if (PyThread_get_thread_ident() != main_thread || open_pipe())
		return watch;
	watch.before = swap(to_fd);
	watch.fd = from_fd;
	return watch;
}

void mcast_forget_signals(struct signal_watch watch)
{
	char numbers[64];
	ssize_t count;

	if (watch.fd < 0)
		return;
	swap(watch.before);
	do {
		count = read(watch.fd, numbers, sizeof(numbers));
		if (count > 0 && watch.before >= 0)
			(void)!write(watch.before, numbers, (size_t)count); /* whoever watches there hears of them, too */
	} while (count == sizeof(numbers));
}

/* The pipe is the parent's, who may be asleep on it. */
void mcast_signals_after_fork(void)
{
	main_thread = PyThread_get_thread_ident();
	if (from_fd >= 0) {
		close(from_fd);
		close(to_fd);
	}
	from_fd = to_fd = NO_FD;
}

/* Waiting for an event of a channel. */
#include "calls.h"

#include "../cm.h"

static int event_step(void *channel, void *what, const struct mcast_wait *wait)
{
	return mcast_wait_event(channel, wait);
}

/* True if an event waits; False: not within the timeout. None: closed. */
PyObject *calls_wait_event(PyObject *module, PyObject *args)
{
	unsigned long long address;
	PyObject *given;
	int64_t timeout;
	int result;

	if (!PyArg_ParseTuple(args, "KO", &address, &given))
		return NULL;
	if (!calls_read_timeout(given, &timeout))
		return calls_refuse_timeout(given);
	result = mcast_wait_with_signals(event_step, (void *)(uintptr_t)address, NULL, NO_FD, calls_deadline(timeout), 0);
	if (result == RAISED)
		return NULL;
	if (result < 0)
		Py_RETURN_NONE;
	return PyBool_FromLong(result);
}

/* Conversion from Python and to Python: types, arguments, times, errors. */
#include "calls.h"

#include <time.h>

struct known known;

static int take(PyObject *from, const char *name, PyObject **out)
{
	replace(out, PyObject_GetAttrString(from, name));
	return *out ? 0 : -1;
}

int calls_know(PyObject *queue_pair, PyObject *batch, const struct known *types)
{
	replace(&known.batch, Py_NewRef(types->batch));
	replace(&known.message, Py_NewRef(types->message));
	replace(&known.gid, Py_NewRef(types->gid));
	if (take(queue_pair, "send", &known.send) || take(queue_pair, "send_one", &known.send_one) ||
	    take(queue_pair, "recv", &known.recv) || take(queue_pair, "recv_one", &known.recv_one) ||
	    take(batch, "release", &known.release))
		return -1;
	return 0;
}

PyObject *calls_fall_back(PyObject *method, PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
	Py_ssize_t named = names ? PyTuple_Size(names) : 0;
	PyObject *positional = PyTuple_New(count + 1), *keywords = NULL, *found = NULL;

	if (!positional)
		return NULL;
	PyTuple_SetItem(positional, 0, Py_NewRef(self));
	for (Py_ssize_t i = 0; i < count; i++)
		PyTuple_SetItem(positional, i + 1, Py_NewRef(args[i]));
	if (named && !(keywords = PyDict_New()))
		goto done;
	for (Py_ssize_t i = 0; i < named; i++)
		if (PyDict_SetItem(keywords, PyTuple_GetItem(names, i), args[count + i]))
			goto done;
	found = PyObject_Call(method, positional, keywords);
done:
	Py_DECREF(positional);
	Py_XDECREF(keywords);
	return found;
}

int calls_sort_arguments(PyObject *const *args, Py_ssize_t count, PyObject *names, const char *const *parameters,
			 int wanted, PyObject **out)
{
	Py_ssize_t named = names ? PyTuple_Size(names) : 0;

	if (count > wanted)
		return 0;
	for (int i = 0; i < wanted; i++)
		out[i] = i < count ? args[i] : NULL;
	for (Py_ssize_t i = 0; i < named; i++) {
		PyObject *name = PyTuple_GetItem(names, i);
		int place = 0;

		while (place < wanted && PyUnicode_CompareWithASCIIString(name, parameters[place]))
			place++;
		if (place == wanted || out[place])
			return 0;
		out[place] = args[count + i];
	}
	return 1;
}

int calls_read_timeout(PyObject *timeout, int64_t *out)
{
	double seconds;

	*out = -1;
	if (!timeout || timeout == Py_None)
		return 1;
	if (!PyFloat_Check(timeout) && !PyLong_CheckExact(timeout))
		return 0; /* the contract says whether it is a time: a flag, of Python or numpy, is none */
	seconds = PyFloat_AsDouble(timeout);
	if (seconds == -1.0 && PyErr_Occurred()) {
		PyErr_Clear(); /* more than a float can say: the contract takes it for the longest time */
		return 0;
	}
	*out = seconds <= 0 ? 0 : seconds > 1e9 ? -1 : (int64_t)(seconds * 1e9);
	return seconds == seconds;
}

PyObject *calls_refuse_timeout(PyObject *given)
{
	if (!PyErr_Occurred())
		PyErr_SetObject(PyExc_ValueError, given); /* the contract has looked at it before */
	return NULL;
}

int64_t calls_deadline(int64_t timeout)
{
	return timeout < 0 ? FOREVER : mcast_now() + timeout;
}

int64_t calls_coarse_now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
	return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

int64_t calls_spin_until(const struct calls *self)
{
	int64_t budget = self->qp->init.busy_poll;

	return budget && budget != FOREVER ? mcast_now() + budget : budget;
}

PyObject *calls_fail(struct calls *self, const char *call, int result, uint32_t posted, uint32_t count)
{
	return PyObject_CallMethod((PyObject *)self, "_fail", "siII", call, result, posted, count);
}

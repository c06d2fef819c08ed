/* QueuePair.recv and recv_one. */
#include "calls.h"

static int receive_step(void *receiving, void *job, const struct mcast_wait *wait)
{
	return mcast_receive(receiving, job, wait);
}

static int wait_for_messages(struct calls *self, struct mcast_receive_job job, int events, int64_t timeout)
{
	int64_t deadline;
	int got = is_usable(self) ? mcast_receive_now(&self->qp->receiving, &job, timeout != 0) : -EBADF;

	if (got || !timeout)
		return got;
	deadline = calls_deadline(timeout);
	Py_BEGIN_ALLOW_THREADS
	got = mcast_spin_receive(&self->qp->receiving, &job, deadline);
	Py_END_ALLOW_THREADS
	if (got)
		return got;
	return mcast_wait_with_signals(receive_step, &self->qp->receiving, &job, events ? self->event_fd : NO_FD, deadline,
				 calls_spin_until(self));
}

static PyObject *recv_one_fast(struct calls *self, int64_t timeout)
{
	struct mcast_message from = { 0 };
	uint8_t copy[COPY_ROOM];
	PyObject *found;
	int got = wait_for_messages(self, (struct mcast_receive_job){ &from, 1, copy }, 0, timeout);

	if (got == 1 && from.slot == NO_SLOT)
		return calls_copy_message(self, &from, copy);
	if (got == 1) {
		found = calls_copy_message(self, &from, NULL);
		calls_give_back(self, &from, 1);
		return found;
	}
	if (!got)
		Py_RETURN_NONE;
	return got == RAISED ? NULL : calls_fail(self, "recv", got, 0, 0);
}

PyObject *calls_recv_one(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
	static const char *const parameters[] = { "timeout" };
	PyObject *given;
	int64_t timeout;

	if (!calls_sort_arguments(args, count, names, parameters, 1, &given) || !calls_read_timeout(given, &timeout) ||
	    !is_usable((struct calls *)object) ||
	    __atomic_load_n(&((struct calls *)object)->on_device, __ATOMIC_RELAXED))
		return PyErr_Occurred() ? NULL : calls_fall_back(known.recv_one, object, args, count, names);
	return recv_one_fast((struct calls *)object, timeout);
}

/* Room for the records of `max` messages, or of as many as there are receives. No records: with an error. */
static struct record_buffer take_buffer(struct calls *self, uint32_t max)
{
	struct record_buffer buffer = { NULL, 0 };

	if (max > self->qp->init.recv_depth)
		max = self->qp->init.recv_depth;
	BEGIN_ALONE((PyObject *)self);
	if (self->spare.size >= max) {
		buffer = self->spare;
		self->spare = (struct record_buffer){ NULL, 0 };
	}
	END_ALONE();
	if (buffer.records)
		return buffer;
	buffer.records = PyMem_Malloc(max * sizeof(*buffer.records));
	buffer.size = max;
	if (!buffer.records)
		PyErr_NoMemory();
	return buffer;
}

static PyObject *recv_fast(struct calls *self, uint32_t max, int events, int64_t timeout)
{
	struct record_buffer buffer = take_buffer(self, max);
	int got;

	if (!buffer.records)
		return NULL;
	if (max > buffer.size)
		max = buffer.size;
	got = wait_for_messages(self, (struct mcast_receive_job){ buffer.records, max, NULL }, events, timeout);
	if (got >= 0 || got == -EAGAIN)
		return lease_new(self, buffer, got > 0 ? (uint32_t)got : 0);
	calls_return_buffer(self, buffer);
	return got == RAISED ? NULL : calls_fail(self, "recv", got, 0, 0);
}

PyObject *calls_recv(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
	static const char *const parameters[] = { "max", "timeout", "events" };
	struct calls *self = (struct calls *)object;
	PyObject *given[3];
	int64_t timeout;
	unsigned long max = 64;
	int events = 0;

	if (!calls_sort_arguments(args, count, names, parameters, 3, given) || !calls_read_timeout(given[1], &timeout))
		return PyErr_Occurred() ? NULL : calls_fall_back(known.recv, object, args, count, names);
	if (given[0])
		max = PyLong_Check(given[0]) && !PyBool_Check(given[0]) ? PyLong_AsUnsignedLong(given[0]) : 0;
	if (given[2])
		events = PyBool_Check(given[2]) ? given[2] == Py_True : -1;
	if (!max || max > UINT32_MAX || events < 0 || !is_usable(self)) {
		PyErr_Clear();
		return calls_fall_back(known.recv, object, args, count, names);
	}
	return recv_fast(self, (uint32_t)max, events, timeout);
}

/* QueuePair._recv: the contract has checked the arguments. */
PyObject *calls_receive(PyObject *object, PyObject *args)
{
	PyObject *given;
	unsigned int max;
	int64_t timeout;
	int events;

	if (!PyArg_ParseTuple(args, "IOp", &max, &given, &events))
		return NULL;
	if (!calls_read_timeout(given, &timeout))
		return calls_refuse_timeout(given);
	if (!is_usable((struct calls *)object))
		return calls_fail((struct calls *)object, "recv", -EBADF, 0, 0);
	return recv_fast((struct calls *)object, max, events, timeout);
}

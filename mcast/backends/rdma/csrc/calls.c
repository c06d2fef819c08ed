/* The calls that are made once a message or once a batch, without a Python frame: two base classes, `Calls` of
 * the QP and `Lease` of its batches. What is not plainly in order goes to the contract's own methods in Python,
 * which know every rule and every error; here it is only decided that none of them applies.
 *
 * The module is a second one in the same library as cffi's: `calls.py` loads it. */
#include "signals.h"

#include <structmember.h>

#include "cm.h"
#include "qp.h"

#include <time.h>
#include <unistd.h>

/* From how much on a post releases the GIL: bytes to copy, and what a message counts beside them. To release the GIL
 * and to take it again was measured at 0.3 us, and at 1.1 us with another thread that wants it; to copy and post 32 KiB
 * at 1.5 to 3 us. */
enum { WORTH_A_HAND_OVER = 32768, POST_BYTES = 256 };

enum {
	SMALLEST_MTU = 256,
	KEPT_GIDS = 64,
	KEPT_ARGUMENTS = 256,
	MESSAGE_FIELDS = 11,
	RAISED = -100000, /* no errno: a Python exception */
};

struct calls {
	PyObject_HEAD /* what it refers to may refer to it: a region that messages arrive in */
	struct mcast_qp *qp; /* NULL: not made yet */
	unsigned forks;
	int event_fd;

	PyObject *destination; /* the one that the next four are for */
	uint64_t serial;       /* of its address handle */
	uint32_t qp_num, qkey;
	uint32_t group_mtu; /* guard G-MTU: what is longer is for the contract to refuse */

	uint32_t limit; /* of a payload, in bytes */
	int64_t limit_until;

	struct room {
		struct mcast_message *records;
		uint32_t size;
	} spare; /* of the last batch that is gone, for the next */

	PyObject *memories; /* generation -> the buffer that payloads arrive in, or a DeviceRegion */
	int on_device;	    /* whether they arrive in one of these */
	PyObject *sources;  /* GIDs the QP has sent from */
	struct known_gid {
		uint8_t raw[16];
		PyObject *gid;
	} senders[KEPT_GIDS], groups[KEPT_GIDS]; /* by the last byte */
};

/* What the views of payloads are made of, and counted by: not the lease itself, which keeps the views. */
struct window {
	PyObject_HEAD
	Py_buffer memory;
	Py_ssize_t exports;
	Py_ssize_t next_offset, next_length; /* of the view that is being made */
};

struct lease {
	PyObject_HEAD
	struct calls *owner;
	struct room room;
	uint32_t count; /* of messages in it */
	char released;
	PyObject *views; /* NULL until there is one */
	Py_buffer memory;
	PyObject *region; /* instead of `memory`, where the CPU has no view: a DeviceRegion */
	struct window *window; /* NULL until a payload is looked at */
};

static PyObject *message_type, *gid_type, *batch_type; /* given by set_up */
static PyObject *window_type, *messages_type;
static PyObject *slow_send, *slow_send_one, *slow_recv, *slow_recv_one, *slow_release;
static PyObject *release_name;
static unsigned forks;

/* Takes the reference to `with`. */
static void replace(PyObject **place, PyObject *with)
{
	PyObject *old = *place;

	*place = with;
	Py_XDECREF(old);
}

static void count_fork(void)
{
	forks++;
	mcast_signals_after_fork();
	mcast_async_after_fork();
}

/* Ask after the last Python code that may run: any may close the QP. */
static int is_usable(const struct calls *self)
{
	return self->qp && self->forks == forks && !mcast_is_shut(&self->qp->gate);
}

static int64_t coarse_now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
	return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Call a function of the contract with the arguments that came. */
static PyObject *call_slowly(PyObject *function, PyObject *self, PyObject *const *args, Py_ssize_t count,
			     PyObject *names)
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
	found = PyObject_Call(function, positional, keywords);
done:
	Py_DECREF(positional);
	Py_XDECREF(keywords);
	return found;
}

/* --- arguments --- */

/* Sorts the arguments into `out` by the names of the parameters; 0 when they do not fit. */
static int sort_arguments(PyObject *const *args, Py_ssize_t count, PyObject *names, const char *const *parameters,
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

/* Nanoseconds, -1 for never; 0 when it is no time. */
static int read_timeout(PyObject *timeout, int64_t *out)
{
	double seconds;

	*out = -1;
	if (!timeout || timeout == Py_None)
		return 1;
	seconds = PyFloat_AsDouble(timeout);
	if (seconds == -1.0 && PyErr_Occurred()) {
		if (PyErr_ExceptionMatches(PyExc_Exception))
			PyErr_Clear(); /* the contract meets it again, and says what it is; Ctrl-C is none of its own */
		return 0;
	}
	*out = seconds <= 0 ? 0 : seconds > 1e9 ? -1 : (int64_t)(seconds * 1e9);
	return seconds == seconds;
}

static PyObject *refuse_timeout(PyObject *given)
{
	if (PyErr_Occurred())
		return NULL;
	return PyErr_Format(PyExc_TypeError, "timeout is %R: give seconds, or None to wait without end", given);
}

static int64_t deadline_of(int64_t timeout)
{
	return timeout < 0 ? FOREVER : mcast_now() + timeout;
}

/* Raise what the result of a call says. */
static PyObject *fail(struct calls *self, const char *call, int result, uint32_t posted, uint32_t count)
{
	return PyObject_CallMethod((PyObject *)self, "_fail", "siII", call, result, posted, count);
}

/* A wait of whichever kind, on an object whose close makes it end with -EBADF. */
typedef int wait_step(void *object, void *what, const struct mcast_wait *wait);

/* Until when calls on it look before they sleep. */
static int64_t spin_until(const struct calls *self)
{
	int64_t budget = self->qp->init.busy_poll;

	return budget && budget != FOREVER ? mcast_now() + budget : budget;
}

/* Carry it out without the GIL. Instead of -EINTR Python's signal handlers run: RAISED if one raises. */
static int wait_with_signals(wait_step *step, void *object, void *what, int event_fd, int64_t deadline, int64_t spin)
{
	unsigned here = forks;
	int result;

	do {
		struct signal_watch watch = mcast_watch_signals();
		struct mcast_wait wait = { .event_fd = event_fd, .signal_fd = watch.fd, .deadline = deadline,
					   .spin_until = spin };

		result = PyErr_CheckSignals() ? RAISED : here != forks ? -EBADF : 0;
		if (watch.fd >= 0)
			mcast_wake_if_missed();
		if (!result) {
			Py_BEGIN_ALLOW_THREADS
			result = step(object, what, &wait);
			Py_END_ALLOW_THREADS
		}
		mcast_forget_signals(watch);
		if (result == -EINTR && PyErr_CheckSignals())
			result = RAISED;
	} while (result == -EINTR);
	return result;
}

/* --- sending --- */

/* Payloads, and what keeps them alive while the GIL is released or Python code runs. */
struct payloads {
	PyObject **items;
	uintptr_t *addresses;
	uint32_t *lengths;
	uint8_t *on_device;
	Py_buffer *held;
	Py_ssize_t count, holding, devices;
	uint32_t longest;
	size_t size;
	char *block; /* NULL: in `kept` */
	_Alignas(16) char kept[KEPT_ARGUMENTS * (sizeof(PyObject *) + sizeof(uintptr_t) + sizeof(uint32_t) +
						 sizeof(uint8_t) + sizeof(Py_buffer))];
};

static int make_room(struct payloads *payloads, Py_ssize_t count)
{
	size_t each = sizeof(PyObject *) + sizeof(uintptr_t) + sizeof(uint32_t) + sizeof(uint8_t) + sizeof(Py_buffer);
	char *at = payloads->kept; // cppcheck-suppress ctuuninitvar

	payloads->block = NULL;
	payloads->count = payloads->holding = payloads->devices = 0;
	payloads->longest = 0;
	payloads->size = 0;
	if (count > KEPT_ARGUMENTS) {
		at = payloads->block = PyMem_Malloc((size_t)count * each);
		if (!at) {
			PyErr_NoMemory();
			return 0;
		}
	}
	payloads->held = (Py_buffer *)at;
	at += (size_t)count * sizeof(Py_buffer);
	payloads->items = (PyObject **)at;
	at += (size_t)count * sizeof(PyObject *);
	payloads->addresses = (uintptr_t *)at;
	at += (size_t)count * sizeof(uintptr_t);
	payloads->lengths = (uint32_t *)at;
	at += (size_t)count * sizeof(uint32_t);
	payloads->on_device = (uint8_t *)at;
	return 1;
}

static void let_go(struct payloads *payloads)
{
	while (payloads->holding)
		PyBuffer_Release(&payloads->held[--payloads->holding]);
	while (payloads->count)
		Py_DECREF(payloads->items[--payloads->count]);
	PyMem_Free(payloads->block);
}

/* Let go of them; 0: an error is set, and stays. */
static int finish_sending(struct payloads *payloads)
{
	PyObject *type, *value, *trace;

	PyErr_Fetch(&type, &value, &trace); /* destructors may run, which are no calls to make with an error */
	let_go(payloads);
	PyErr_Restore(type, value, trace);
	return !type;
}

/* 0: it is none that could be sent from here. */
static int add_payload(const struct calls *self, struct payloads *payloads, PyObject *payload)
{
	Py_ssize_t place = payloads->count++;
	char *start;
	Py_ssize_t length;

	payloads->items[place] = Py_NewRef(payload);
	if (PyBytes_CheckExact(payload)) {
		PyBytes_AsStringAndSize(payload, &start, &length);
	} else {
		Py_buffer *held = &payloads->held[payloads->holding];

		if (PyObject_GetBuffer(payload, held, PyBUF_SIMPLE)) {
			PyErr_Clear();
			return 0;
		}
		payloads->holding++;
		start = held->buf;
		length = held->len;
	}
	if (length > self->limit)
		return 0;
	payloads->addresses[place] = (uintptr_t)start;
	payloads->lengths[place] = (uint32_t)length;
	payloads->on_device[place] = 0;
	payloads->size += (size_t)length;
	if ((uint32_t)length > payloads->longest)
		payloads->longest = (uint32_t)length;
	return 1;
}

/* What lies on a device, as a pair of address and length; the contract has looked at both. 0: with an error. */
static int add_device_payload(struct payloads *payloads, PyObject *pair)
{
	Py_ssize_t place = payloads->count++;
	unsigned long long address;

	payloads->items[place] = Py_NewRef(pair);
	if (!PyArg_ParseTuple(pair, "KI", &address, &payloads->lengths[place]))
		return 0;
	payloads->addresses[place] = (uintptr_t)address;
	payloads->on_device[place] = 1;
	payloads->devices++;
	return 1;
}

/* Whether the limit that was checked still is the port's. */
static int is_limit_fresh(const struct calls *self, uint32_t longest)
{
	return longest <= SMALLEST_MTU || coarse_now() < self->limit_until;
}

/* 0: the arguments are for the contract. */
static int read_imm(PyObject *imm, struct mcast_send_job *job)
{
	unsigned long value;

	if (!imm || imm == Py_None)
		return 1;
	value = PyLong_Check(imm) ? PyLong_AsUnsignedLong(imm) : ~0UL;
	if (value > UINT32_MAX) {
		PyErr_Clear();
		return 0;
	}
	job->has_imm = 1;
	job->imm = (uint32_t)value;
	return 1;
}

static int send_step(void *qp, void *job, const struct mcast_wait *wait)
{
	return mcast_send(qp, job, wait);
}

/* 1: done. 0: too late; or -errno, RAISED. */
static int carry_out(struct calls *self, struct mcast_send_job *job, size_t bytes, int64_t timeout)
{
	int64_t deadline;
	int result;

	if (bytes + job->count * POST_BYTES < WORTH_A_HAND_OVER) {
		result = mcast_send_now(self->qp, job, timeout != 0);
	} else {
		Py_BEGIN_ALLOW_THREADS
		result = mcast_send_now(self->qp, job, timeout != 0);
		Py_END_ALLOW_THREADS
	}
	if (result || !timeout)
		return result;
	deadline = deadline_of(timeout);
	Py_BEGIN_ALLOW_THREADS
	result = mcast_spin_send(self->qp, job, deadline);
	Py_END_ALLOW_THREADS
	if (result)
		return result;
	return wait_with_signals(send_step, self->qp, job, NO_FD, deadline, spin_until(self));
}

static int send_payloads(struct calls *self, struct mcast_send_job *job, struct payloads *payloads, int64_t timeout)
{
	job->addresses = payloads->addresses;
	job->lengths = payloads->lengths;
	job->on_device = payloads->devices ? payloads->on_device : NULL;
	job->count = (uint32_t)payloads->count;
	return carry_out(self, job, payloads->size, timeout);
}

/* NULL without an error: not sent, ask the contract. */
static PyObject *send_fast(struct calls *self, PyObject *destination, PyObject *list, PyObject *one, PyObject *imm,
			   PyObject *given)
{
	struct payloads payloads;
	struct mcast_send_job job = { .count = 0 };
	Py_ssize_t count = list ? PyList_Size(list) : 1;
	PyObject *found = NULL;
	int64_t timeout;
	int result = 0;

	if (!count || !read_timeout(given, &timeout) || !read_imm(imm, &job) || !make_room(&payloads, count))
		return NULL;
	for (Py_ssize_t i = 0; i < count; i++) {
		PyObject *payload = list ? PyList_GetItem(list, i) : one; /* NULL: it has become shorter meanwhile */

		if (!payload || !add_payload(self, &payloads, payload))
			goto done;
	}
	if (destination == self->destination && payloads.longest <= self->group_mtu && is_usable(self) &&
	    is_limit_fresh(self, payloads.longest)) {
		job.serial = self->serial;
		job.remote_qp_num = self->qp_num;
		job.remote_qkey = self->qkey;
		result = send_payloads(self, &job, &payloads, timeout);
		if (result == 1)
			found = Py_NewRef(destination);
		else if (result != RAISED && !(result == -ESTALE && !job.posted))
			fail(self, "send", result, job.posted, job.count);
	}
done:
	if (!finish_sending(&payloads))
		Py_CLEAR(found);
	return found;
}

static PyObject *calls_send(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
	static const char *const parameters[] = { "destination", "batch", "imm", "timeout" };
	PyObject *found, *given[4];

	if (sort_arguments(args, count, names, parameters, 4, given) && given[0] && given[1] &&
	    PyList_CheckExact(given[1])) {
		Py_ssize_t size = PyList_Size(given[1]);

		found = send_fast((struct calls *)object, given[0], given[1], NULL, given[2], given[3]);
		if (found) {
			Py_DECREF(found);
			return PyLong_FromSsize_t(size);
		}
		if (PyErr_Occurred())
			return NULL;
	}
	return call_slowly(slow_send, object, args, count, names);
}

static PyObject *calls_send_one(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
	static const char *const parameters[] = { "destination", "payload", "imm", "timeout" };
	PyObject *given[4], *found;

	if (sort_arguments(args, count, names, parameters, 4, given) && given[0] && given[1]) {
		found = send_fast((struct calls *)object, given[0], NULL, given[1], given[2], given[3]);
		if (found) {
			Py_DECREF(found);
			Py_RETURN_NONE;
		}
		if (PyErr_Occurred())
			return NULL;
	}
	return call_slowly(slow_send_one, object, args, count, names);
}

static PyObject *calls_flush(PyObject *object, PyObject *given)
{
	struct calls *self = (struct calls *)object;
	struct mcast_send_job job = { .end = ALL_POSTED };
	int64_t timeout;
	int result;

	if (!read_timeout(given, &timeout))
		return refuse_timeout(given);
	result = is_usable(self) ? carry_out(self, &job, 0, timeout) : -EBADF;
	if (result == 1)
		Py_RETURN_NONE;
	return result == RAISED ? NULL : fail(self, "flush", result, 0, 0);
}

/* --- messages --- */

static PyObject *gid_of(struct known_gid *known, const uint8_t *raw)
{
	known += raw[15] % KEPT_GIDS;
	if (!known->gid || memcmp(known->raw, raw, 16)) {
		PyObject *gid = PyObject_CallFunction(gid_type, "y#", raw, (Py_ssize_t)16);

		if (!gid)
			return NULL;
		replace(&known->gid, gid);
		memcpy(known->raw, raw, 16);
	}
	return Py_NewRef(known->gid);
}

/* Takes the reference to `payload`. `region`: where it is, if that is on a device. */
static PyObject *make_message(struct calls *self, const struct mcast_message *from, PyObject *payload,
			      PyObject *region)
{
	PyObject *source = gid_of(self->senders, from->source), *message = NULL;
	int own = 0;

	if (payload && source && from->own_qp_num)
		own = PySet_Contains(self->sources, source);
	if (payload && source && own >= 0)
		message = PyType_GenericAlloc((PyTypeObject *)message_type, MESSAGE_FIELDS);
	if (!message) {
		Py_XDECREF(payload);
		Py_XDECREF(source);
		return NULL;
	}
	PyTuple_SetItem(message, 0, payload);
	PyTuple_SetItem(message, 1, source);
	PyTuple_SetItem(message, 2, PyLong_FromUnsignedLong(from->src_qp));
	PyTuple_SetItem(message, 3, gid_of(self->groups, from->group));
	PyTuple_SetItem(message, 4, from->has_imm ? PyLong_FromUnsignedLong(from->imm) : Py_NewRef(Py_None));
	PyTuple_SetItem(message, 5, PyBool_FromLong(own));
	PyTuple_SetItem(message, 6, PyLong_FromUnsignedLong(from->src_lid));
	PyTuple_SetItem(message, 7, PyLong_FromUnsignedLong(from->sl));
	PyTuple_SetItem(message, 8, PyLong_FromUnsignedLong(from->path_bits));
	PyTuple_SetItem(message, 9,
			region ? PyObject_CallMethod(region, "at", "KI", (unsigned long long)from->offset, from->length) :
				 Py_NewRef(Py_None));
	PyTuple_SetItem(message, 10, self->qp->recv.clock ? PyLong_FromUnsignedLongLong(from->timestamp) :
							    Py_NewRef(Py_None));
	for (Py_ssize_t i = 1; i < MESSAGE_FIELDS; i++)
		if (!PyTuple_GetItem(message, i)) {
			Py_DECREF(message);
			return NULL;
		}
	return message;
}

/* The buffer that messages of that generation arrive in, or the region, new; 0, or -1 with an error. */
static int open_memory(struct calls *self, uint32_t generation, Py_buffer *out, PyObject **region)
{
	PyObject *key = PyLong_FromUnsignedLong(generation), *memory;

	if (!key)
		return -1;
	memory = PyDict_GetItemWithError(self->memories, key);
	if (!memory && !PyErr_Occurred())
		PyErr_SetObject(PyExc_KeyError, key);
	Py_DECREF(key);
	if (!memory || PyObject_CheckBuffer(memory))
		return memory ? PyObject_GetBuffer(memory, out, PyBUF_SIMPLE) : -1;
	*region = Py_NewRef(memory);
	return 0;
}

/* --- receiving --- */

static int receive_step(void *qp, void *what, const struct mcast_wait *wait)
{
	const struct room *room = what;

	return mcast_receive(qp, room->records, room->size, wait);
}

static int wait_for_messages(struct calls *self, struct mcast_message *out, uint32_t max, int events, int64_t timeout)
{
	struct room room = { out, max };
	int64_t deadline;
	int got = is_usable(self) ? mcast_receive_now(self->qp, out, max, timeout != 0) : -EBADF;

	if (got || !timeout)
		return got;
	deadline = deadline_of(timeout);
	Py_BEGIN_ALLOW_THREADS
	got = mcast_spin_receive(self->qp, out, max, deadline);
	Py_END_ALLOW_THREADS
	if (got)
		return got;
	return wait_with_signals(receive_step, self->qp, &room, events ? self->event_fd : NO_FD, deadline,
				 spin_until(self));
}

static void give_back_receives(struct calls *self, const struct mcast_message *messages, uint32_t count)
{
	if (self->forks == forks)
		mcast_release(self->qp, messages[0].generation, messages, count);
}

static PyObject *copy_out(struct calls *self, const struct mcast_message *from)
{
	PyObject *payload = NULL, *view = NULL, *region = NULL, *message;
	Py_buffer memory;

	if (!open_memory(self, from->generation, &memory, &region)) {
		if (region) { /* a thread that waited when another changed where messages arrive */
			payload = PyBytes_FromStringAndSize(NULL, 0);
		} else {
			payload = PyBytes_FromStringAndSize((const char *)memory.buf + from->offset, from->length);
			PyBuffer_Release(&memory);
		}
	}
	if (payload) {
		view = PyMemoryView_FromObject(payload);
		Py_DECREF(payload);
	}
	message = view ? make_message(self, from, view, region) : NULL;
	Py_XDECREF(region);
	return message;
}

static PyObject *recv_one_fast(struct calls *self, int64_t timeout)
{
	struct mcast_message from = { 0 };
	PyObject *found;
	int got = wait_for_messages(self, &from, 1, 0, timeout);

	if (got == 1) {
		found = copy_out(self, &from);
		give_back_receives(self, &from, 1);
		return found;
	}
	if (!got)
		Py_RETURN_NONE;
	return got == RAISED ? NULL : fail(self, "recv", got, 0, 0);
}

static PyObject *calls_recv_one(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
	static const char *const parameters[] = { "timeout" };
	PyObject *given;
	int64_t timeout;

	if (!sort_arguments(args, count, names, parameters, 1, &given) || !read_timeout(given, &timeout) ||
	    !is_usable((struct calls *)object) || ((struct calls *)object)->on_device)
		return PyErr_Occurred() ? NULL : call_slowly(slow_recv_one, object, args, count, names);
	return recv_one_fast((struct calls *)object, timeout);
}

/* Room for the records of `max` messages, or of as many as there are receives. No records: with an error. */
static struct room take_room(struct calls *self, uint32_t max)
{
	struct room room = self->spare;

	if (max > self->qp->init.recv_depth)
		max = self->qp->init.recv_depth;
	if (room.size >= max) {
		self->spare = (struct room){ NULL, 0 };
		return room;
	}
	room.records = PyMem_Malloc(max * sizeof(*room.records));
	room.size = max;
	if (!room.records)
		PyErr_NoMemory();
	return room;
}

static void give_room(struct calls *self, struct room room)
{
	if (room.size > self->spare.size) {
		struct room smaller = self->spare;

		self->spare = room;
		room = smaller;
	}
	PyMem_Free(room.records);
}

/* Takes the room. Without a lease the messages are lost, their receives are not. */
static PyObject *new_lease(struct calls *self, struct room room, uint32_t count)
{
	struct lease *lease = (struct lease *)PyType_GenericAlloc((PyTypeObject *)batch_type, 0);

	if (!lease || (count && open_memory(self, room.records[0].generation, &lease->memory, &lease->region))) {
		if (count)
			give_back_receives(self, room.records, count);
		Py_XDECREF((PyObject *)lease);
		give_room(self, room);
		return NULL;
	}
	lease->owner = (struct calls *)Py_NewRef((PyObject *)self);
	lease->count = count;
	if (count)
		lease->room = room;
	else
		give_room(self, room);
	return (PyObject *)lease;
}

static PyObject *recv_fast(struct calls *self, uint32_t max, int events, int64_t timeout)
{
	struct room room = take_room(self, max);
	int got;

	if (!room.records)
		return NULL;
	got = wait_for_messages(self, room.records, room.size < max ? room.size : max, events, timeout);
	if (got >= 0 || got == -EAGAIN)
		return new_lease(self, room, got > 0 ? (uint32_t)got : 0);
	give_room(self, room);
	return got == RAISED ? NULL : fail(self, "recv", got, 0, 0);
}

static PyObject *calls_recv(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
	static const char *const parameters[] = { "max", "timeout", "events" };
	struct calls *self = (struct calls *)object;
	PyObject *given[3];
	int64_t timeout;
	unsigned long max = 64;
	int events = 0;

	if (!sort_arguments(args, count, names, parameters, 3, given) || !read_timeout(given[1], &timeout))
		return PyErr_Occurred() ? NULL : call_slowly(slow_recv, object, args, count, names);
	if (given[0])
		max = PyLong_Check(given[0]) ? PyLong_AsUnsignedLong(given[0]) : 0;
	if (given[2])
		events = PyObject_IsTrue(given[2]);
	if (!max || max > UINT32_MAX || events < 0 || !is_usable(self)) {
		PyErr_Clear();
		return call_slowly(slow_recv, object, args, count, names);
	}
	return recv_fast(self, (uint32_t)max, events, timeout);
}

/* QueuePair._recv: the contract has checked the arguments. */
static PyObject *calls_receive(PyObject *object, PyObject *args)
{
	PyObject *given;
	unsigned int max;
	int64_t timeout;
	int events;

	if (!PyArg_ParseTuple(args, "IOp", &max, &given, &events))
		return NULL;
	if (!read_timeout(given, &timeout))
		return refuse_timeout(given);
	if (!is_usable((struct calls *)object))
		return fail((struct calls *)object, "recv", -EBADF, 0, 0);
	return recv_fast((struct calls *)object, max, events, timeout);
}

/* For the contract's own path: send a list, to an address handle that Python has looked up.
 * False: the handle is retired, and nothing is sent. */
static PyObject *calls_post(PyObject *object, PyObject *args)
{
	struct calls *self = (struct calls *)object;
	struct mcast_send_job job = { .count = 0 };
	struct payloads payloads;
	PyObject *list, *imm, *given;
	unsigned long long serial;
	int64_t timeout;
	int result = RAISED;

	if (!PyArg_ParseTuple(args, "KIIO!OO", &serial, &job.remote_qp_num, &job.remote_qkey, &PyList_Type, &list, &imm,
			      &given))
		return NULL;
	if (!read_timeout(given, &timeout))
		return refuse_timeout(given);
	if (!make_room(&payloads, PyList_Size(list)))
		return NULL;
	job.serial = serial;
	read_imm(imm, &job);
	for (Py_ssize_t i = 0; i < PyList_Size(list) && !PyErr_Occurred(); i++) {
		PyObject *payload = PyList_GetItem(list, i);

		if (PyTuple_CheckExact(payload))
			add_device_payload(&payloads, payload);
		else if (!add_payload(self, &payloads, payload))
			fail(self, "send", -EMSGSIZE, 0, (uint32_t)PyList_Size(list));
	}
	if (!PyErr_Occurred())
		result = is_usable(self) ? send_payloads(self, &job, &payloads, timeout) : -EBADF;
	if (result != 1 && result != RAISED && !(result == -ESTALE && !job.posted))
		fail(self, "send", result, job.posted, job.count);
	return finish_sending(&payloads) ? PyBool_FromLong(result == 1) : NULL;
}

/* --- what Python tells --- */

static PyObject *calls_arm(PyObject *object, PyObject *args)
{
	struct calls *self = (struct calls *)object;
	unsigned long long address;
	PyObject *memories, *sources;

	if (!PyArg_ParseTuple(args, "KiO!O!", &address, &self->event_fd, &PyDict_Type, &memories, &PySet_Type,
			      &sources))
		return NULL;
	replace(&self->memories, Py_NewRef(memories));
	replace(&self->sources, Py_NewRef(sources));
	self->forks = forks;
	self->qp = (struct mcast_qp *)(uintptr_t)address;
	Py_RETURN_NONE;
}

static PyObject *calls_aim(PyObject *object, PyObject *args)
{
	struct calls *self = (struct calls *)object;
	PyObject *destination;
	unsigned long long serial;

	if (!PyArg_ParseTuple(args, "OKIII", &destination, &serial, &self->qp_num, &self->qkey, &self->group_mtu))
		return NULL;
	self->serial = serial;
	replace(&self->destination, Py_NewRef(destination));
	Py_RETURN_NONE;
}

static PyObject *calls_arrive(PyObject *object, PyObject *given)
{
	int on_device = PyObject_IsTrue(given);

	if (on_device < 0)
		return NULL;
	((struct calls *)object)->on_device = on_device;
	Py_RETURN_NONE;
}

static PyObject *calls_limit(PyObject *object, PyObject *args)
{
	struct calls *self = (struct calls *)object;
	double seconds;

	if (!PyArg_ParseTuple(args, "Id", &self->limit, &seconds))
		return NULL;
	self->limit_until = coarse_now() + (int64_t)(seconds * 1e9);
	Py_RETURN_NONE;
}

static int calls_visit(PyObject *object, visitproc visit, void *arg)
{
	struct calls *self = (struct calls *)object;

	Py_VISIT(Py_TYPE(object));
	Py_VISIT(self->destination);
	Py_VISIT(self->memories);
	Py_VISIT(self->sources);
	return 0;
}

static void calls_dealloc(PyObject *object)
{
	struct calls *self = (struct calls *)object;
	PyTypeObject *type = Py_TYPE(object);

	PyObject_GC_UnTrack(object);
	PyMem_Free(self->spare.records);
	if (self->qp && self->forks == forks && mcast_is_shut(&self->qp->gate))
		mcast_free_qp(self->qp);
	Py_XDECREF(self->destination);
	Py_XDECREF(self->memories);
	Py_XDECREF(self->sources);
	for (int i = 0; i < KEPT_GIDS; i++) {
		Py_XDECREF(self->senders[i].gid);
		Py_XDECREF(self->groups[i].gid);
	}
	((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
	Py_DECREF(type);
}

#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL | METH_KEYWORDS

static PyMethodDef calls_methods[] = {
	{ "send", FAST(calls_send), "QueuePair.send" },
	{ "send_one", FAST(calls_send_one), "QueuePair.send_one" },
	{ "recv", FAST(calls_recv), "QueuePair.recv" },
	{ "recv_one", FAST(calls_recv_one), "QueuePair.recv_one" },
	{ "_recv", calls_receive, METH_VARARGS, "QueuePair._recv" },
	{ "_post", calls_post, METH_VARARGS, "send a list to an address handle" },
	{ "_flush", calls_flush, METH_O, "QueuePair._flush" },
	{ "_arm", calls_arm, METH_VARARGS, "use this QP" },
	{ "_aim", calls_aim, METH_VARARGS, "the address handle of a destination" },
	{ "_arrive", calls_arrive, METH_O, "whether messages arrive in another device's memory" },
	{ "_limit", calls_limit, METH_VARARGS, "the MTU, and how many seconds to believe it" },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot calls_slots[] = {
	{ Py_tp_dealloc, calls_dealloc },
	{ Py_tp_traverse, calls_visit },
	{ Py_tp_methods, calls_methods },
	{ 0, NULL },
};

static PyType_Spec calls_spec = {
	.name = "mcast.backends.rdma._calls.Calls",
	.basicsize = sizeof(struct calls),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
	.slots = calls_slots,
};

/* --- batches --- */

static int window_get_buffer(PyObject *object, Py_buffer *view, int flags)
{
	struct window *self = (struct window *)object;
	char *start = (char *)self->memory.buf + self->next_offset;

	if (PyBuffer_FillInfo(view, object, start, self->next_length, 1, flags))
		return -1;
	self->exports++;
	return 0;
}

static void window_release_buffer(PyObject *object, Py_buffer *view)
{
	((struct window *)object)->exports--;
}

static void window_dealloc(PyObject *object)
{
	PyTypeObject *type = Py_TYPE(object);

	PyBuffer_Release(&((struct window *)object)->memory);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
	Py_DECREF(type);
}

static PyType_Slot window_slots[] = {
	{ Py_tp_dealloc, window_dealloc },
	{ Py_bf_getbuffer, window_get_buffer },
	{ Py_bf_releasebuffer, window_release_buffer },
	{ 0, NULL },
};

static PyType_Spec window_spec = {
	.name = "mcast.backends.rdma._calls.Window",
	.basicsize = sizeof(struct window),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = window_slots,
};

/* Give the receives back. 0, or -1: a payload is still in use. */
static int give_back(struct lease *self)
{
	if (self->window && self->window->exports) {
		PyErr_SetString(PyExc_BufferError,
				"a slice of a payload of this batch is in use: drop it, or copy it first");
		return -1;
	}
	if (self->count)
		give_back_receives(self->owner, self->room.records, self->count);
	PyBuffer_Release(&self->memory);
	return 0;
}

static PyObject *lease_give_back(PyObject *object, PyObject *unused)
{
	if (give_back((struct lease *)object))
		return NULL;
	Py_RETURN_NONE;
}

/* 0: one of them is in use, and the contract's own method says so. */
static int end_views(struct lease *self)
{
	for (Py_ssize_t i = self->views ? PyList_Size(self->views) : 0; i > 0; i--) {
		PyObject *done = PyObject_CallMethodObjArgs(PyList_GetItem(self->views, i - 1), release_name, NULL);

		if (!done) {
			PyErr_Clear();
			return 0;
		}
		Py_DECREF(done);
	}
	Py_CLEAR(self->views);
	return 1;
}

static PyObject *lease_release(PyObject *object, PyObject *unused)
{
	struct lease *self = (struct lease *)object;

	if (!self->released) {
		if (!end_views(self))
			return PyObject_CallFunctionObjArgs(slow_release, object, NULL);
		if (give_back(self))
			return NULL;
		self->released = 1;
	}
	Py_RETURN_NONE;
}

static PyObject *lease_enter(PyObject *object, PyObject *unused)
{
	return Py_NewRef(object);
}

static PyObject *lease_exit(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
	return lease_release(object, NULL);
}

static Py_ssize_t lease_length(PyObject *object)
{
	return ((struct lease *)object)->count;
}

static PyObject *view_of(struct lease *self, uint64_t offset, Py_ssize_t length)
{
	struct window *window = self->window;

	if (!self->memory.obj)
		return PyMemoryView_FromMemory((char *)"", 0, PyBUF_READ);
	if (!window) {
		window = (struct window *)PyType_GenericAlloc((PyTypeObject *)window_type, 0);
		if (!window || PyObject_GetBuffer(self->memory.obj, &window->memory, PyBUF_SIMPLE)) {
			Py_XDECREF((PyObject *)window);
			return NULL;
		}
		self->window = window;
	}
	window->next_offset = (Py_ssize_t)offset;
	window->next_length = length;
	return PyMemoryView_FromObject((PyObject *)window);
}

static PyObject *lease_message(PyObject *object, PyObject *index)
{
	struct lease *self = (struct lease *)object;
	Py_ssize_t place = PyLong_AsSsize_t(index);

	if (place < 0 || place >= self->count)
		return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_IndexError, "message %zd", place);
	return make_message(self->owner, &self->room.records[place],
			    view_of(self, self->room.records[place].offset, self->room.records[place].length), self->region);
}

static PyObject *lease_views(PyObject *object, void *unused)
{
	struct lease *self = (struct lease *)object;

	if (!self->views)
		self->views = PyList_New(0);
	return Py_XNewRef(self->views);
}

/* The view ends with the lease. 0, or -1 with an error. */
static int keep_view(struct lease *self, PyObject *view)
{
	if (!view)
		return -1;
	if (!self->views)
		self->views = PyList_New(0);
	return self->views ? PyList_Append(self->views, view) : -1;
}

static int is_leased(const struct lease *self)
{
	if (self->released)
		PyErr_SetString(PyExc_ValueError, "this batch was released: copy a payload with bytes() before that");
	return !self->released;
}

/* Keeps the lease: `for message in qp.recv(...)` has no other owner of it. */
struct messages {
	PyObject_HEAD
	struct lease *lease;
	uint32_t next;
};

static PyObject *lease_iterate(PyObject *object)
{
	struct messages *messages = (struct messages *)PyType_GenericAlloc((PyTypeObject *)messages_type, 0);

	if (messages)
		messages->lease = (struct lease *)Py_NewRef(object);
	return (PyObject *)messages;
}

static PyObject *messages_next(PyObject *object)
{
	struct messages *self = (struct messages *)object;
	struct lease *lease = self->lease;
	const struct mcast_message *record = &lease->room.records[self->next];
	PyObject *message;

	if (self->next == lease->count || !is_leased(lease))
		return NULL;
	message = make_message(lease->owner, record, view_of(lease, record->offset, record->length), lease->region);
	if (!message || keep_view(lease, PyTuple_GetItem(message, 0))) {
		Py_XDECREF(message);
		return NULL;
	}
	self->next++;
	return message;
}

static void messages_dealloc(PyObject *object)
{
	PyTypeObject *type = Py_TYPE(object);

	Py_XDECREF((PyObject *)((struct messages *)object)->lease);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
	Py_DECREF(type);
}

static PyType_Slot messages_slots[] = {
	{ Py_tp_dealloc, messages_dealloc },
	{ Py_tp_iter, PyObject_SelfIter },
	{ Py_tp_iternext, messages_next },
	{ 0, NULL },
};

static PyType_Spec messages_spec = {
	.name = "mcast.backends.rdma._calls.Messages",
	.basicsize = sizeof(struct messages),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = messages_slots,
};

static PyObject *lease_lengths(PyObject *object, void *unused)
{
	struct lease *self = (struct lease *)object;
	PyObject *lengths = PyList_New(self->count);

	for (uint32_t i = 0; lengths && i < self->count; i++)
		PyList_SetItem(lengths, i, PyLong_FromUnsignedLong(self->room.records[i].length));
	return lengths;
}

static PyObject *lease_records(PyObject *object, void *unused)
{
	struct lease *self = (struct lease *)object;

	return PyBytes_FromStringAndSize((const char *)self->room.records,
					 (Py_ssize_t)(self->count * sizeof(*self->room.records)));
}

static PyObject *lease_memory(PyObject *object, void *unused)
{
	struct lease *self = (struct lease *)object;
	PyObject *view;

	if (self->region && is_leased(self))
		return PyObject_CallMethod(self->region, "no_view", NULL);
	view = is_leased(self) ? view_of(self, 0, self->memory.len) : NULL;
	if (keep_view(self, view))
		Py_CLEAR(view);
	return view;
}

/* A view still in use elsewhere keeps its buffers leased: lost receives, never wrong bytes. */
static void lease_finalize(PyObject *object)
{
	PyObject *type, *value, *trace, *done;

	PyErr_Fetch(&type, &value, &trace);
	done = ((struct lease *)object)->owner ? lease_release(object, NULL) : NULL;
	Py_XDECREF(done);
	PyErr_Clear();
	PyErr_Restore(type, value, trace);
}

static void lease_dealloc(PyObject *object)
{
	struct lease *self = (struct lease *)object;
	PyTypeObject *type = Py_TYPE(object);

	PyBuffer_Release(&self->memory);
	Py_XDECREF(self->region);
	Py_XDECREF((PyObject *)self->window);
	if (self->owner)
		give_room(self->owner, self->room);
	Py_XDECREF(self->views);
	Py_XDECREF((PyObject *)self->owner);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
	Py_DECREF(type);
}

static PyMemberDef lease_members[] = {
	{ "_released", T_BOOL, offsetof(struct lease, released), 0, NULL },
	{ NULL, 0, 0, 0, NULL },
};

static PyMethodDef lease_methods[] = {
	{ "release", lease_release, METH_NOARGS, "Batch.release" },
	{ "__enter__", lease_enter, METH_NOARGS, NULL },
	{ "__exit__", (PyCFunction)(void (*)(void))lease_exit, METH_FASTCALL, NULL },
	{ "_message", lease_message, METH_O, "Batch._message" },
	{ "_release", lease_give_back, METH_NOARGS, "Batch._release" },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef lease_getters[] = {
	{ "lengths", lease_lengths, NULL, "Batch.lengths", NULL },
	{ "memory", lease_memory, NULL, "Batch.memory", NULL },
	{ "records", lease_records, NULL, "Batch.records", NULL },
	{ "_views", lease_views, NULL, "the payloads that were looked at", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyType_Slot lease_slots[] = {
	{ Py_tp_dealloc, lease_dealloc },
	{ Py_tp_finalize, lease_finalize },
	{ Py_tp_members, lease_members },
	{ Py_tp_methods, lease_methods },
	{ Py_tp_getset, lease_getters },
	{ Py_tp_iter, lease_iterate },
	{ Py_sq_length, lease_length },
	{ 0, NULL },
};

static PyType_Spec lease_spec = {
	.name = "mcast.backends.rdma._calls.Lease",
	.basicsize = sizeof(struct lease),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = lease_slots,
};

/* --- the module --- */

static int event_step(void *channel, void *what, const struct mcast_wait *wait)
{
	return mcast_wait_event(channel, wait);
}

/* Whether an event waits; False: not within the timeout. None: closed. */
static PyObject *wait_event(PyObject *module, PyObject *args)
{
	unsigned long long address;
	PyObject *given;
	int64_t timeout;
	int result;

	if (!PyArg_ParseTuple(args, "KO", &address, &given))
		return NULL;
	if (!read_timeout(given, &timeout))
		return refuse_timeout(given);
	result = wait_with_signals(event_step, (void *)(uintptr_t)address, NULL, NO_FD, deadline_of(timeout), 0);
	if (result == RAISED)
		return NULL;
	if (result < 0)
		Py_RETURN_NONE;
	return PyBool_FromLong(result);
}

static int take(PyObject *from, const char *name, PyObject **out)
{
	replace(out, PyObject_GetAttrString(from, name));
	return *out ? 0 : -1;
}

static PyObject *set_up(PyObject *module, PyObject *args)
{
	PyObject *queue_pair, *batch, *set_wakeup_fd;
	unsigned long main_thread;

	if (!PyArg_ParseTuple(args, "OOOOOOk", &queue_pair, &batch, &batch_type, &message_type, &gid_type,
			      &set_wakeup_fd, &main_thread) ||
	    mcast_set_up_signals(set_wakeup_fd, main_thread) ||
	    take(queue_pair, "send", &slow_send) || take(queue_pair, "send_one", &slow_send_one) ||
	    take(queue_pair, "recv", &slow_recv) || take(queue_pair, "recv_one", &slow_recv_one) ||
	    take(batch, "release", &slow_release))
		return NULL;
	Py_INCREF(batch_type);
	Py_INCREF(message_type);
	Py_INCREF(gid_type);
	Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
	{ "set_up", set_up, METH_VARARGS, "the contract's classes QueuePair and Batch, the provider's batch, Message, Gid, "
	  "signal.set_wakeup_fd, the main thread's ident" },
	{ "wait_event", wait_event, METH_VARARGS, "sleep until an event waits at a channel" },
	{ NULL, NULL, 0, NULL },
};

static struct PyModuleDef module_def = {
	PyModuleDef_HEAD_INIT,
	.m_name = "_calls",
	.m_size = -1,
	.m_methods = module_methods,
};

PyMODINIT_FUNC PyInit__calls(void)
{
	PyObject *module = PyModule_Create(&module_def);
	PyObject *calls = PyType_FromSpec(&calls_spec), *lease = PyType_FromSpec(&lease_spec);

	window_type = PyType_FromSpec(&window_spec);
	messages_type = PyType_FromSpec(&messages_spec);
	release_name = PyUnicode_InternFromString("release");
	if (!module || !calls || !lease || !window_type || !messages_type || !release_name ||
	    PyModule_AddObjectRef(module, "Calls", calls) ||
	    PyModule_AddObjectRef(module, "Lease", lease) || pthread_atfork(NULL, NULL, count_fork))
		Py_CLEAR(module);
	Py_XDECREF(calls);
	Py_XDECREF(lease);
	return module;
}

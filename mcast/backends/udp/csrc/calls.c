/* QueuePair.send, send_one, recv and recv_one: a base class of the QP in C, for what is plainly in order. All else goes to the
 * contract's methods in Python, which know the rules and the errors.
 *
 * Each call takes the backend's guard as `Guard.run` does (mcast/contract/poison.py): the lock, then the flag, and the flag is
 * cleared by reaching the end. In between no Python code of a program runs, but for what a garbage collection runs, which finds
 * the flag. System calls run without the GIL. A call that waits sleeps outside of the guard, on the epoll object of the queue
 * pair's sockets, which also says which of them to look at.
 *
 * A send is plain if the last send by way of Python was to the same destination, since when no address or link of the host has
 * changed (`aim`), the queue pair is in RTS, and all payloads are bytes that fit. */
#include "object.h"

#include <errno.h>
#include <string.h>
#include <structmember.h>
#include <sys/epoll.h>
#include <time.h>

enum {
	MESSAGE_FIELDS = 12,
	MANY = 32,	 /* so many messages at once may be the rest of more, and some may have found a full buffer */
	EVENTS = 16,
	RECHECK_MS = 1000, /* mcast.contract.poison.MAX_SLEEP */
	KEPT_GIDS = 16,
};

#define ASK_PYTHON (-2) /* beside -1: with an error */

static struct {
	PyObject *queue_pair, *message, *gid, *rts, *no_batch;
	PyObject *send, *send_one, *recv, *recv_one;
	PyObject *amid, *nothing, *state, *mtu, *error, *news, *shown, *leases, *ended, *deferred;
} known;

struct known_gid {
	uint32_t address;
	PyObject *gid;
};

struct calls {
	PyObject_HEAD
	struct object *ring;
	int is_open; /* else all is left to Python */
	PyObject *guard, *acquire, *release, *core, *port, *path, *readiness;
	int epoll_fd;
	PyObject *destination;
	struct send_to to;
	uint32_t group_mtu;
	struct known_gid gids[KEPT_GIDS];
};

int calls_set_up(PyObject *args)
{
	struct {
		PyObject **at;
		const char *name;
	} names[] = {
		{ &known.amid, "amid" }, { &known.nothing, "" },     { &known.state, "state" },	  { &known.mtu, "mtu" },
		{ &known.error, "error" }, { &known.news, "port_changed" },  { &known.shown, "shown" },	  { &known.leases, "leases" },
		{ &known.ended, "ended" }, { &known.send, "send" },  { &known.send_one, "send_one" }, { &known.recv, "recv" },
		{ &known.recv_one, "recv_one" }, { &known.deferred, "deferred" },
	};

	if (!PyArg_ParseTuple(args, "OOOOO", &known.queue_pair, &known.message, &known.gid, &known.rts, &known.no_batch))
		return -1;
	Py_INCREF(known.queue_pair);
	Py_INCREF(known.message);
	Py_INCREF(known.gid);
	Py_INCREF(known.rts);
	Py_INCREF(known.no_batch);
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (!(*names[i].at = PyUnicode_InternFromString(names[i].name)))
			return -1;
	return 0;
}

/* --- arguments, and the way to Python --- */

static PyObject *fall_back(PyObject *name, PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
	Py_ssize_t named = names ? PyTuple_Size(names) : 0;
	PyObject *method = PyObject_GetAttr(known.queue_pair, name), *positional = PyTuple_New(count + 1);
	PyObject *keywords = named ? PyDict_New() : NULL, *found = NULL;

	if (!method || !positional || (named && !keywords))
		goto done;
	PyTuple_SetItem(positional, 0, Py_NewRef(self));
	for (Py_ssize_t i = 0; i < count; i++)
		PyTuple_SetItem(positional, i + 1, Py_NewRef(args[i]));
	for (Py_ssize_t i = 0; i < named; i++)
		if (PyDict_SetItem(keywords, PyTuple_GetItem(names, i), args[count + i]))
			goto done;
	found = PyObject_Call(method, positional, keywords);
done:
	Py_XDECREF(method);
	Py_XDECREF(positional);
	Py_XDECREF(keywords);
	return found;
}

/* Sort arguments by their names; 0: they are for the contract to judge. */
static int sort_arguments(PyObject *const *args, Py_ssize_t count, PyObject *names, const char *const *parameters, int wanted,
			  PyObject **out)
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
	for (int i = 0; i < wanted; i++)
		if (out[i] == Py_None)
			out[i] = NULL;
	return 1;
}

/* Read seconds; 0: they are for the contract to judge. */
static int read_timeout(PyObject *given, double *out)
{
	*out = -1;
	if (!given)
		return 1;
	if (!PyFloat_CheckExact(given) && !PyLong_CheckExact(given))
		return 0;
	*out = PyFloat_AsDouble(given);
	if (*out == -1.0 && PyErr_Occurred())
		PyErr_Clear();
	return *out >= 0 && *out < 1e6;
}

/* --- the guard --- */

static int let_go(struct calls *self)
{
	PyObject *done = PyObject_CallNoArgs(self->release);

	Py_XDECREF(done);
	return done ? 0 : -1;
}

/* 1: this thread has the guard, and the queue pair is open. 0: Python says why not. -1: with an error. */
static int enter(struct calls *self, PyObject *call)
{
	PyObject *taken, *amid;
	int is_free;

	if (!self->is_open)
		return 0;
	taken = PyObject_CallNoArgs(self->acquire);
	if (!taken)
		return -1;
	Py_DECREF(taken);
	amid = PyObject_GetAttr(self->guard, known.amid);
	is_free = amid && !PyUnicode_GetLength(amid) && self->is_open;
	Py_XDECREF(amid);
	if (is_free && !PyObject_SetAttr(self->guard, known.amid, call))
		return 1;
	return let_go(self) || PyErr_Occurred() ? -1 : 0;
}

/* End what `enter` began: after it the object is whole. 0; or -1, with an error. */
static int leave(struct calls *self)
{
	int failed = PyObject_SetAttr(self->guard, known.amid, known.nothing);
	PyObject *deferred, *done = NULL;

	if (let_go(self) || failed)
		return -1;
	deferred = PyObject_GetAttr(self->guard, known.deferred);
	if (deferred && PyList_Size(deferred)) /* closes that came from a finalizer meanwhile */
		done = PyObject_CallMethod(self->guard, "finish", NULL);
	Py_XDECREF(deferred);
	Py_XDECREF(done);
	return PyErr_Occurred() ? -1 : 0;
}

/* The same after an error in the middle, which leaves the object broken. */
static void leave_broken(struct calls *self)
{
	PyObject *type, *value, *trace;

	PyErr_Fetch(&type, &value, &trace);
	let_go(self);
	PyErr_Restore(type, value, trace);
}

/* Whether the attribute is that object. */
static int is(PyObject *object, PyObject *name, PyObject *wanted)
{
	PyObject *found = PyObject_GetAttr(object, name);

	if (!found)
		PyErr_Clear();
	Py_XDECREF(found);
	return found == wanted;
}

static uint32_t port_mtu(const struct calls *self)
{
	PyObject *found = PyObject_GetAttr(self->port, known.mtu);
	unsigned long mtu = found ? PyLong_AsUnsignedLong(found) : 0;

	Py_XDECREF(found);
	return (uint32_t)mtu;
}

/* --- sending --- */

/* A new reference, which another thread that changes the list cannot take away; NULL: there is none. */
static PyObject *item_of(PyObject *list, Py_ssize_t place)
{
#ifdef Py_GIL_DISABLED
	PyObject *found = PyList_GetItemRef(list, place);
#else
	PyObject *found = Py_XNewRef(PyList_GetItem(list, place));
#endif
	if (!found)
		PyErr_Clear(); /* the list has become shorter meanwhile */
	return found;
}

/* Send payloads from a list, or one payload; return how many, or -1 with an error. Fewer than all: Python sends the others. */
static Py_ssize_t send_plain(struct calls *self, PyObject *list, PyObject *one, Py_ssize_t count, Py_ssize_t limit)
{
	struct payload payloads[AT_ONCE];
	PyObject *held[AT_ONCE];
	Py_ssize_t all = 0;
	int sent = 0, some;

	do {
		for (some = 0; some < AT_ONCE && all + some < count; some++) {
			PyObject *item = list ? item_of(list, all + some) : Py_NewRef(one);
			char *start;
			Py_ssize_t length;

			if (!item || !PyBytes_CheckExact(item) || PyBytes_Size(item) > limit) {
				Py_XDECREF(item);
				count = all + some;
				break;
			}
			PyBytes_AsStringAndSize(item, &start, &length);
			payloads[some].parts[0] = (struct iovec){ start, (size_t)length };
			payloads[some].parts[1] = (struct iovec){ NULL, 0 };
			held[some] = item;
		}
		if (some) {
			Py_BEGIN_ALLOW_THREADS
			sent = ring_send_some(self->ring, &self->to, payloads, some);
			Py_END_ALLOW_THREADS
		}
		for (int i = 0; i < some; i++)
			Py_DECREF(held[i]);
		all += sent > 0 ? sent : 0;
	} while (all < count && sent == some);
	return all;
}

/* Whether all of a list are bytes that fit, which has to be known before the first is sent. */
static int are_plain(PyObject *list, Py_ssize_t count, Py_ssize_t limit)
{
	for (Py_ssize_t i = 0; list && i < count; i++) {
		PyObject *item = item_of(list, i);
		int is_plain = item && PyBytes_CheckExact(item) && PyBytes_Size(item) <= limit;

		Py_XDECREF(item);
		if (!is_plain)
			return 0;
	}
	return 1;
}

/* Return how many were sent, or -1 with an error. */
static Py_ssize_t try_send(struct calls *self, PyObject *call, PyObject *const *given, PyObject *list, Py_ssize_t count)
{
	Py_ssize_t sent = 0, limit;
	double timeout;
	int entered;

	if (given[2] || !read_timeout(given[3], &timeout) || given[0] != self->destination)
		return 0;
	entered = enter(self, call);
	if (entered <= 0)
		return entered;
	limit = port_mtu(self);
	limit = limit < self->group_mtu ? limit : self->group_mtu;
	if (given[0] == self->destination && is(self->core, known.state, known.rts) && are_plain(list, count, limit))
		sent = send_plain(self, list, given[1], count, limit);
	return leave(self) ? -1 : sent;
}

static PyObject *calls_send(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
	static const char *const parameters[] = { "destination", "batch", "imm", "timeout" };
	PyObject *given[4];
	Py_ssize_t sent = 0, all = 0;

	if (sort_arguments(args, count, names, parameters, 4, given) && given[0] && given[1] && PyList_CheckExact(given[1])) {
		all = PyList_Size(given[1]);
		sent = try_send((struct calls *)object, known.send, given, given[1], all);
	}
	if (sent < 0)
		return NULL;
	if (!sent)
		return fall_back(known.send, object, args, count, names);
	if (sent == all)
		return PyLong_FromSsize_t(sent);
	return PyObject_CallMethod(object, "_send_rest", "OOOn", given[0], given[1], given[3] ? given[3] : Py_None, sent);
}

static PyObject *calls_send_one(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
	static const char *const parameters[] = { "destination", "payload", "imm", "timeout" };
	PyObject *given[4];
	Py_ssize_t sent = 0;

	if (sort_arguments(args, count, names, parameters, 4, given) && given[0] && given[1])
		sent = try_send((struct calls *)object, known.send, given, NULL, 1);
	if (sent < 0)
		return NULL;
	return sent ? Py_NewRef(Py_None) : fall_back(known.send_one, object, args, count, names);
}

/* --- receiving --- */

static PyObject *gid_of(struct calls *self, uint32_t address)
{
	struct known_gid *one = &self->gids[address % KEPT_GIDS];
	uint8_t raw[16] = { [10] = 0xFF, [11] = 0xFF };

	if (one->gid && one->address == address)
		return Py_NewRef(one->gid);
	for (int i = 0; i < 4; i++)
		raw[12 + i] = (uint8_t)(address >> 8 * (3 - i));
	Py_CLEAR(one->gid);
	one->address = address;
	one->gid = PyObject_CallFunction(known.gid, "y#", raw, (Py_ssize_t)sizeof(raw));
	return Py_XNewRef(one->gid);
}

/* Set the next field of a message; 0: there is none, with an error. */
static int add_field(PyObject *message, int *count, PyObject *field)
{
	if (field)
		PyTuple_SetItem(message, (*count)++, field);
	return field != NULL;
}

/* A copy of the first message, whose receive is posted again. What runs Python ends here at its first error. */
static PyObject *copy_first(struct calls *self)
{
	struct ring *ring = &self->ring->ring;
	struct record *from = &ring->queue[ring->first];
	char *bytes = (char *)ring->memory + from->slot * ring->stride;
	PyObject *copy = PyBytes_FromStringAndSize(bytes, from->length);
	PyObject *message = copy ? PyType_GenericAlloc((PyTypeObject *)known.message, MESSAGE_FIELDS) : NULL;
	int own = from->source == ring->address && from->src_qp == ring->qp_num, at = 0;

	if (message && add_field(message, &at, PyMemoryView_FromObject(copy)) && add_field(message, &at, gid_of(self, from->source)) &&
	    add_field(message, &at, PyLong_FromUnsignedLong(from->src_qp)) && add_field(message, &at, gid_of(self, from->dest)) &&
	    add_field(message, &at, from->has_imm ? PyLong_FromUnsignedLong(from->imm) : Py_NewRef(Py_None)) &&
	    add_field(message, &at, PyBool_FromLong(own)) && add_field(message, &at, PyLong_FromLong(0)) &&
	    add_field(message, &at, Py_NewRef(Py_None)) && add_field(message, &at, PyLong_FromLong(0)))
		while (at < MESSAGE_FIELDS)
			add_field(message, &at, Py_NewRef(Py_None));
	Py_XDECREF(copy);
	if (at < MESSAGE_FIELDS) {
		Py_XDECREF(message);
		return NULL;
	}
	ring->free[ring->free_count++] = from->slot;
	ring->first = (ring->first + 1) % ring->depth;
	ring->queued--;
	return message;
}

/* A batch of the first messages. */
static PyObject *lease_first(struct calls *self, unsigned long max)
{
	PyObject *both = ring_take_records(self->ring, max), *batch = NULL;

	if (both) {
		batch = PyObject_CallMethod((PyObject *)self, "_leased", "OO", PyTuple_GetItem(both, 0), PyTuple_GetItem(both, 1));
		Py_DECREF(both);
	}
	return batch;
}

/* The sockets that epoll has found readable, as a set. */
static uint64_t set_of(const struct calls *self, const struct epoll_event *events, int count)
{
	const struct object *ring = self->ring;
	uint64_t found = 0;

	for (int i = 0; i < count; i++)
		for (uint32_t place = 0; place < ring->source_count && place < SOURCES; place++)
			if (ring->sources[place].fd == events[i].data.fd)
				found |= (uint64_t)1 << place;
	return found;
}

/* Receive from those sockets. 1; or ASK_PYTHON, before anything is changed or where the queue pair fails; or -1: broken. */
static int receive(struct calls *self, uint64_t sources)
{
	PyObject *leases = PyObject_GetAttr(self->path, known.leases);
	PyObject *ended = leases ? PyObject_GetAttr(leases, known.ended) : NULL;
	int is_plain = ended && !PyList_Size(ended) && is(self->core, known.state, known.rts), found;

	Py_XDECREF(leases);
	Py_XDECREF(ended);
	if (!is_plain)
		return ASK_PYTHON;
	if (!ring_is_prepared(self->ring))
		return -1;
	self->ring->ring.mtu = port_mtu(self);
	Py_BEGIN_ALLOW_THREADS
	found = ring_receive(self->ring, sources, 1);
	Py_END_ALLOW_THREADS
	if (found >= MANY && ring_overflow(self->ring) != self->ring->overflow) {
		PyObject *done = PyObject_CallMethod(self->path, "check_overflow", NULL);

		Py_XDECREF(done);
		if (!done)
			return -1;
	}
	return self->ring->ring.is_failed ? ASK_PYTHON : 1;
}

/* Let the descriptor of `fileno` be readable while messages are queued. 0; or -1: broken. */
static int show(struct calls *self)
{
	PyObject *done;

	if (is(self->readiness, known.shown, self->ring->ring.queued ? Py_True : Py_False))
		return 0;
	done = PyObject_CallMethod(self->readiness, "show", NULL);
	Py_XDECREF(done);
	return done ? 0 : -1;
}

static double now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

/* Look once, and return a message (max 0) or a batch; NULL: `result` is 0 for none, ASK_PYTHON, or -1 with an error. */
static PyObject *look(struct calls *self, PyObject *call, unsigned long max, const struct epoll_event *events, int count,
		      int *result)
{
	PyObject *found = NULL;

	*result = enter(self, call);
	if (*result <= 0) {
		*result = *result ? -1 : ASK_PYTHON;
		return NULL;
	}
	if (!self->ring->ring.queued && count)
		*result = receive(self, set_of(self, events, count));
	if (*result > 0 && self->ring->ring.queued) {
		found = max ? lease_first(self, max) : copy_first(self);
		*result = found ? 1 : -1;
	} else if (*result > 0 && is(self->core, known.error, Py_None) && is(self->core, known.news, Py_False)) {
		*result = 0;
	} else if (*result > 0) {
		*result = ASK_PYTHON;
	}
	if ((*result == 0 || *result == 1) && show(self))
		*result = -1;
	if (*result == -1)
		leave_broken(self);
	else if (leave(self))
		*result = -1;
	if (*result == -1)
		Py_CLEAR(found);
	return found;
}

/* Wait for messages, at most so many seconds (-1: for ever), and return as `look` does. `waits`: 0 to look once. */
static PyObject *receive_plain(struct calls *self, PyObject *call, unsigned long max, double timeout, int waits, int *result)
{
	double end = timeout > 0 ? now() + timeout : 0;

	for (;;) {
		struct epoll_event events[EVENTS];
		int count = 0, milliseconds = RECHECK_MS, fd = self->epoll_fd, failed = 0;
		double left = timeout > 0 ? end - now() : timeout;
		PyObject *found;

		*result = ASK_PYTHON;
		if (!self->is_open)
			return NULL;
		if (!waits || !timeout || (timeout > 0 && left <= 0))
			milliseconds = 0;
		else if (timeout > 0 && left < RECHECK_MS / 1e3)
			milliseconds = (int)(left * 1e3) + 1;
		if (!self->ring->ring.queued) {
			Py_BEGIN_ALLOW_THREADS
			count = epoll_wait(fd, events, EVENTS, milliseconds);
			failed = count < 0 ? errno : 0;
			Py_END_ALLOW_THREADS
		}
		if (failed && failed != EINTR)
			return NULL;
		*result = -1;
		if (PyErr_CheckSignals())
			return NULL;
		found = look(self, call, max, events, count > 0 ? count : 0, result);
		if (found || *result || (!milliseconds && !failed))
			return found;
	}
}

static PyObject *calls_recv(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
	static const char *const parameters[] = { "max", "timeout", "events" };
	PyObject *given[3], *found;
	unsigned long max = 64;
	double timeout;
	int result, events;

	if (!sort_arguments(args, count, names, parameters, 3, given) || !read_timeout(given[1], &timeout) ||
	    (given[2] && !PyBool_Check(given[2])) || (given[0] && !PyLong_CheckExact(given[0])))
		return fall_back(known.recv, object, args, count, names);
	if (given[0])
		max = PyLong_AsUnsignedLong(given[0]);
	events = given[2] == Py_True;
	if (!max || max > INT32_MAX) {
		PyErr_Clear();
		return fall_back(known.recv, object, args, count, names);
	}
	found = receive_plain((struct calls *)object, known.recv, max, timeout, !events, &result);
	if (found || result == -1)
		return found;
	/* Python waits for events beside messages */
	return result || events ? fall_back(known.recv, object, args, count, names) : PyObject_CallNoArgs(known.no_batch);
}

static PyObject *calls_recv_one(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
	static const char *const parameters[] = { "timeout" };
	PyObject *given[1], *found;
	double timeout;
	int result;

	if (!sort_arguments(args, count, names, parameters, 1, given) || !read_timeout(given[0], &timeout))
		return fall_back(known.recv_one, object, args, count, names);
	found = receive_plain((struct calls *)object, known.recv, 0, timeout, 1, &result);
	if (found || result == -1)
		return found;
	return result ? fall_back(known.recv_one, object, args, count, names) : Py_NewRef(Py_None);
}

/* --- the type --- */

/* Serve a queue pair from now on: its ring, guard, core, path and readiness, and the descriptor of its epoll object. */
static PyObject *calls_arm(PyObject *object, PyObject *args)
{
	struct calls *self = (struct calls *)object;
	PyObject *ring, *guard, *core, *port, *path, *readiness, *lock;

	if (self->ring || !PyArg_ParseTuple(args, "O!OOOOOi", ring_type, &ring, &guard, &core, &port, &path, &readiness, &self->epoll_fd))
		return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_RuntimeError, "it serves a queue pair");
	self->guard = Py_NewRef(guard);
	self->core = Py_NewRef(core);
	self->port = Py_NewRef(port);
	self->path = Py_NewRef(path);
	self->readiness = Py_NewRef(readiness);
	self->ring = (struct object *)Py_NewRef(ring);
	lock = PyObject_GetAttrString(self->guard, "lock");
	self->acquire = lock ? PyObject_GetAttrString(lock, "acquire") : NULL;
	self->release = lock ? PyObject_GetAttrString(lock, "release") : NULL;
	Py_XDECREF(lock);
	if (!self->acquire || !self->release)
		return NULL;
	self->is_open = 1;
	Py_RETURN_NONE;
}

/* Send to that destination from here, from now on: what to send to, and the group's MTU; None: to none. */
static PyObject *calls_aim(PyObject *object, PyObject *args)
{
	struct calls *self = (struct calls *)object;
	PyObject *destination, *to = NULL, *old = self->destination;
	struct send_to found = { .fd = -1 };
	unsigned int group_mtu = 0;

	if (!PyArg_ParseTuple(args, "O|OI", &destination, &to, &group_mtu))
		return NULL;
	if (to && ring_parse_to(to, self->ring, &found))
		return NULL;
	self->destination = to ? Py_NewRef(destination) : NULL;
	self->to = found;
	self->group_mtu = group_mtu;
	Py_XDECREF(old);
	Py_RETURN_NONE;
}

static PyObject *calls_disarm(PyObject *object, PyObject *nothing)
{
	((struct calls *)object)->is_open = 0;
	Py_RETURN_NONE;
}

static int calls_visit(PyObject *object, visitproc visit, void *arg)
{
	struct calls *self = (struct calls *)object;

	Py_VISIT(Py_TYPE(object));
	Py_VISIT(self->guard);
	Py_VISIT(self->acquire);
	Py_VISIT(self->release);
	Py_VISIT(self->core);
	Py_VISIT(self->port);
	Py_VISIT(self->path);
	Py_VISIT(self->readiness);
	Py_VISIT(self->destination);
	return 0;
}

static void calls_dealloc(PyObject *object)
{
	struct calls *self = (struct calls *)object;
	PyTypeObject *type = Py_TYPE(object);

	PyObject_GC_UnTrack(object);
	Py_XDECREF((PyObject *)self->ring);
	Py_XDECREF(self->guard);
	Py_XDECREF(self->acquire);
	Py_XDECREF(self->release);
	Py_XDECREF(self->core);
	Py_XDECREF(self->port);
	Py_XDECREF(self->path);
	Py_XDECREF(self->readiness);
	Py_XDECREF(self->destination);
	for (int i = 0; i < KEPT_GIDS; i++)
		Py_XDECREF(self->gids[i].gid);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
	Py_DECREF(type);
}

#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL | METH_KEYWORDS

static PyMethodDef calls_methods[] = {
	{ "send", FAST(calls_send), "QueuePair.send" },
	{ "send_one", FAST(calls_send_one), "QueuePair.send_one" },
	{ "recv", FAST(calls_recv), "QueuePair.recv" },
	{ "recv_one", FAST(calls_recv_one), "QueuePair.recv_one" },
	{ "_arm", calls_arm, METH_VARARGS, "Serve a queue pair." },
	{ "_aim", calls_aim, METH_VARARGS, "Send to a destination." },
	{ "_disarm", calls_disarm, METH_NOARGS, "Leave all to Python." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot calls_slots[] = {
	{ Py_tp_dealloc, calls_dealloc },
	{ Py_tp_traverse, calls_visit },
	{ Py_tp_methods, calls_methods },
	{ 0, NULL },
};

PyType_Spec calls_spec = {
	.name = "mcast.backends.udp._native.Calls",
	.basicsize = sizeof(struct calls),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
	.slots = calls_slots,
};

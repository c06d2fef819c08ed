/* QueuePair.send, send_one, flush in C: arguments and buffers to a send job; odd ones fall back to Python. */
#include "calls.h"

/* From so many bytes on a post releases the GIL: the bytes to copy, and what each message counts beside them. To
 * release the GIL and to take it again was measured at 0.3 us, and at 1.1 us with another thread that wants it; to copy
 * and post 32 KiB at 1.5 to 3 us. */
enum { WORTH_A_HAND_OVER = 32768, POST_BYTES = 256 };

enum { SMALLEST_MTU = 256, STACK_ARGUMENTS = 256 };

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
	_Alignas(16) char kept[STACK_ARGUMENTS * (sizeof(PyObject *) + sizeof(uintptr_t) + sizeof(uint32_t) +
						 sizeof(uint8_t) + sizeof(Py_buffer))];
};

static int make_room(struct payloads *payloads, Py_ssize_t count)
{
	size_t each = sizeof(PyObject *) + sizeof(uintptr_t) + sizeof(uint32_t) + sizeof(uint8_t) + sizeof(Py_buffer);
	char *at = payloads->kept; // cppcheck-suppress[ctuuninitvar,uninitvar]

	payloads->block = NULL;
	payloads->count = payloads->holding = payloads->devices = 0;
	payloads->longest = 0;
	payloads->size = 0;
	if (count > STACK_ARGUMENTS) {
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

/* Let go of the payloads; 0: an error is set, and stays. */
static int finish_sending(struct payloads *payloads)
{
	PyObject *type, *value, *trace;

	PyErr_Fetch(&type, &value, &trace); /* destructors may run, which are no calls to make with an error */
	let_go(payloads);
	PyErr_Restore(type, value, trace);
	return !type;
}

/* Return 1 if the buffer is plainly one that mcast/arguments/buffers.py takes. All else is for the contract, because
 * Python objects may be in it: O is one, and & points to something. A B of more than a byte may be a union or a packed
 * structure of ctypes, and a record, T, may have fields that its format does not name. What stands between two colons
 * is the name of a field. */
static int is_plain(const Py_buffer *buffer)
{
	for (const char *at = buffer->format ? buffer->format : "B"; *at; at++) {
		if (*at == ':')
			at = strchr(at + 1, ':');
		else if (*at == 'O' || *at == '&' || *at == 'T' || (*at == 'B' && buffer->itemsize != 1))
			return 0;
		if (!at)
			return 0;
	}
	return PyBuffer_IsContiguous(buffer, 'A');
}

/* Takes the reference. 0: the payload cannot be sent from here. */
static int add_payload(const struct calls *self, struct payloads *payloads, PyObject *payload)
{
	Py_ssize_t place = payloads->count++;
	char *start;
	Py_ssize_t length;

	payloads->items[place] = payload;
	if (PyBytes_CheckExact(payload)) {
		PyBytes_AsStringAndSize(payload, &start, &length);
	} else {
		Py_buffer *held = &payloads->held[payloads->holding];

		if (PyObject_GetBuffer(payload, held, PyBUF_FULL_RO)) {
			PyErr_Clear();
			return 0;
		}
		payloads->holding++;
		if (!is_plain(held))
			return 0;
		start = held->buf;
		length = held->len;
	}
	if (length > __atomic_load_n(&self->limit, __ATOMIC_RELAXED))
		return 0;
	payloads->addresses[place] = (uintptr_t)start;
	payloads->lengths[place] = (uint32_t)length;
	payloads->size += (size_t)length;
	if ((uint32_t)length > payloads->longest)
		payloads->longest = (uint32_t)length;
	return 1;
}

/* Each row of a buffer of two dimensions, behind a head. 0: they cannot be sent from here. */
static int add_rows(const struct calls *self, struct payloads *payloads, const Py_buffer *rows, Py_ssize_t head)
{
	Py_ssize_t count = rows->shape[0], size = rows->len / count;

	if (head + size > __atomic_load_n(&self->limit, __ATOMIC_RELAXED))
		return 0;
	for (; payloads->count < count; payloads->count++) {
		payloads->items[payloads->count] = Py_NewRef(rows->obj);
		payloads->addresses[payloads->count] = (uintptr_t)rows->buf + (uintptr_t)(payloads->count * size);
		payloads->lengths[payloads->count] = (uint32_t)size;
	}
	payloads->size = (size_t)rows->len;
	payloads->longest = (uint32_t)size;
	return 1;
}

/* Add memory of a device, given as a pair of address and length, which the contract has checked. Takes the reference. 0:
 * with an error. */
static int add_device_payload(struct payloads *payloads, PyObject *pair)
{
	Py_ssize_t place = payloads->count++;
	unsigned long long address;

	payloads->items[place] = pair;
	if (!PyArg_ParseTuple(pair, "KI", &address, &payloads->lengths[place]))
		return 0;
	payloads->addresses[place] = (uintptr_t)address;
	payloads->on_device[place] = 1;
	payloads->devices++;
	return 1;
}

/* Return 1 if the limit that was checked still is the port's; with a GIL nobody has lowered it meanwhile. */
static int is_limit_fresh(const struct calls *self, uint32_t longest)
{
	if (longest <= SMALLEST_MTU)
		return 1;
	if (calls_coarse_now() >= __atomic_load_n(&self->limit_until, __ATOMIC_ACQUIRE))
		return 0;
#ifdef Py_GIL_DISABLED
	if (longest > __atomic_load_n(&self->limit, __ATOMIC_RELAXED))
		return 0;
#endif
	return 1;
}

/* 0: the arguments are for the contract. */
static int read_imm(PyObject *imm, struct mcast_send_job *job)
{
	unsigned long value;

	if (!imm || imm == Py_None)
		return 1;
	value = PyLong_Check(imm) && !PyBool_Check(imm) ? PyLong_AsUnsignedLong(imm) : ~0UL;
	if (value > UINT32_MAX) {
		PyErr_Clear();
		return 0;
	}
	job->has_imm = 1;
	job->imm = (uint32_t)value;
	return 1;
}

static int send_step(void *sending, void *job, const struct mcast_wait *wait)
{
	return mcast_send(sending, job, wait);
}

/* 1: done. 0: too late; or -errno, RAISED. */
static int carry_out(struct calls *self, struct mcast_send_job *job, size_t bytes, int64_t timeout)
{
	int64_t deadline;
	int result;

	if (bytes + job->count * POST_BYTES < WORTH_A_HAND_OVER) {
		result = mcast_send_now(&self->qp->sending, job, timeout != 0);
	} else {
		Py_BEGIN_ALLOW_THREADS
		result = mcast_send_now(&self->qp->sending, job, timeout != 0);
		Py_END_ALLOW_THREADS
	}
	if (result || !timeout)
		return result;
	deadline = calls_deadline(timeout);
	Py_BEGIN_ALLOW_THREADS
	result = mcast_spin_send(&self->qp->sending, job, deadline);
	Py_END_ALLOW_THREADS
	if (result)
		return result;
	return mcast_wait_with_signals(send_step, &self->qp->sending, job, NO_FD, deadline, calls_spin_until(self));
}

static int send_payloads(struct calls *self, struct mcast_send_job *job, struct payloads *payloads, int64_t timeout)
{
	job->addresses = payloads->addresses;
	job->lengths = payloads->lengths;
	job->on_device = payloads->devices ? payloads->on_device : NULL;
	job->count = (uint32_t)payloads->count;
	return carry_out(self, job, payloads->size, timeout);
}

/* Return 1 if the destination is the last one, with its address handle. */
static int find_aim(struct calls *self, PyObject *destination, struct mcast_send_job *job, uint32_t *group_mtu)
{
	int is_known = 0;

	BEGIN_ALONE((PyObject *)self);
	if (destination == self->destination) {
		job->serial = self->serial;
		job->remote_qp_num = self->qp_num;
		job->remote_qkey = self->qkey;
		*group_mtu = self->group_mtu;
		is_known = 1;
	}
	END_ALONE();
	return is_known;
}

/* 1: all are sent. 0: none is, ask the contract. -1: with an error. */
static int send_fast(struct calls *self, PyObject *const *given, PyObject *list, const Py_buffer *rows)
{
	struct payloads payloads;
	struct mcast_send_job job = { .count = 0 };
	Py_ssize_t count = rows ? rows->shape[0] : list ? PyList_Size(list) : 1;
	uint32_t group_mtu;
	int64_t timeout;
	int result = 0;

	if (!count || !calls_read_timeout(given[3], &timeout) || !read_imm(given[2], &job) ||
	    !make_room(&payloads, count))
		return PyErr_Occurred() ? -1 : 0;
	if (rows && !add_rows(self, &payloads, rows, 0))
		goto done;
	for (Py_ssize_t i = payloads.count; i < count; i++) {
		PyObject *payload = list ? item_of(list, i) : Py_NewRef(given[1]); /* NULL: the list has become shorter meanwhile */

		if (!payload || !add_payload(self, &payloads, payload))
			goto done;
	}
	if (find_aim(self, given[0], &job, &group_mtu) && payloads.longest <= group_mtu && is_usable(self) &&
	    is_limit_fresh(self, payloads.longest)) {
		result = send_payloads(self, &job, &payloads, timeout);
		if (result != 1 && result != RAISED && !(result == -ESTALE && !job.posted))
			calls_fail(self, "send", result, job.posted, job.count);
	}
done:
	return finish_sending(&payloads) ? result == 1 : -1;
}

/* Do as send_fast, with a memoryview of two dimensions. `count`: of its messages. */
static int send_rows(struct calls *self, PyObject *const *given, Py_ssize_t *count)
{
	Py_buffer rows;
	int sent = 0;

	if (PyObject_GetBuffer(given[1], &rows, PyBUF_ND | PyBUF_FORMAT)) {
		PyErr_Clear();
		return 0;
	}
	if (rows.ndim == 2 && rows.len && is_plain(&rows)) {
		*count = rows.shape[0];
		sent = send_fast(self, given, NULL, &rows);
	}
	PyBuffer_Release(&rows);
	return sent;
}

PyObject *calls_send(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
	static const char *const parameters[] = { "destination", "batch", "imm", "timeout" };
	PyObject *given[4];
	Py_ssize_t size = 0;
	int sent = 0;

	if (!calls_sort_arguments(args, count, names, parameters, 4, given) || !given[0] || !given[1]) {
		;
	} else if (PyList_CheckExact(given[1])) {
		size = PyList_Size(given[1]);
		sent = send_fast((struct calls *)object, given, given[1], NULL);
	} else if (PyMemoryView_Check(given[1])) {
		sent = send_rows((struct calls *)object, given, &size);
	}
	if (sent < 0)
		return NULL;
	return sent ? PyLong_FromSsize_t(size) : calls_fall_back(known.send, object, args, count, names);
}

PyObject *calls_send_one(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
	static const char *const parameters[] = { "destination", "payload", "imm", "timeout" };
	PyObject *given[4];
	int sent = 0;

	if (calls_sort_arguments(args, count, names, parameters, 4, given) && given[0] && given[1])
		sent = send_fast((struct calls *)object, given, NULL, NULL);
	if (sent < 0)
		return NULL;
	return sent ? Py_NewRef(Py_None) : calls_fall_back(known.send_one, object, args, count, names);
}

PyObject *calls_flush(PyObject *object, PyObject *given)
{
	struct calls *self = (struct calls *)object;
	struct mcast_send_job job = { .end = ALL_POSTED };
	int64_t timeout;
	int result;

	if (!calls_read_timeout(given, &timeout))
		return calls_refuse_timeout(given);
	result = is_usable(self) ? carry_out(self, &job, 0, timeout) : -EBADF;
	if (result == 1)
		Py_RETURN_NONE;
	return result == RAISED ? NULL : calls_fail(self, "flush", result, 0, 0);
}

/* Return the result of a post: False if the address handle is retired, and nothing is sent. */
static PyObject *post_result(struct calls *self, struct payloads *payloads, const struct mcast_send_job *job, int result)
{
	if (result != 1 && result != RAISED && !(result == -ESTALE && !job->posted))
		calls_fail(self, "send", result, job->posted, job->count);
	return finish_sending(payloads) ? PyBool_FromLong(result == 1) : NULL;
}

/* For the contract's own path: send a list, to an address handle that Python has looked up. */
PyObject *calls_post(PyObject *object, PyObject *args)
{
	struct calls *self = (struct calls *)object;
	struct mcast_send_job job = { .count = 0 };
	struct payloads payloads;
	PyObject *list, *imm, *given;
	Py_ssize_t count;
	unsigned long long serial;
	int64_t timeout;
	int result = RAISED;

	if (!PyArg_ParseTuple(args, "KIIO!OO", &serial, &job.remote_qp_num, &job.remote_qkey, &PyList_Type, &list, &imm,
			      &given))
		return NULL;
	if (!calls_read_timeout(given, &timeout))
		return calls_refuse_timeout(given);
	count = PyList_Size(list);
	if (!make_room(&payloads, count))
		return NULL;
	memset(payloads.on_device, 0, (size_t)count);
	job.serial = serial;
	read_imm(imm, &job);
	for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
		PyObject *payload = item_of(list, i);

		if (!payload)
			break; /* with an error */
		if (PyTuple_CheckExact(payload))
			add_device_payload(&payloads, payload);
		else if (!add_payload(self, &payloads, payload))
			calls_fail(self, "send", -EMSGSIZE, 0, (uint32_t)count);
	}
	if (!PyErr_Occurred())
		result = is_usable(self) ? send_payloads(self, &job, &payloads, timeout) : -EBADF;
	return post_result(self, &payloads, &job, result);
}

/* Send the rows of two buffers, head and body: the contract has seen that these are as many, and none is empty. */
static PyObject *post_rows(struct calls *self, struct mcast_send_job *job, const Py_buffer *heads, const Py_buffer *bodies,
			   int64_t timeout)
{
	Py_ssize_t head_length = heads->len / heads->shape[0];
	struct payloads payloads;
	int result = RAISED;

	if (!make_room(&payloads, bodies->shape[0]))
		return NULL;
	job->heads = heads->buf;
	job->head_length = (uint32_t)head_length;
	if (!add_rows(self, &payloads, bodies, head_length)) {
		calls_fail(self, "send", -EMSGSIZE, 0, (uint32_t)bodies->shape[0]);
	} else {
		payloads.size += (size_t)heads->len;
		result = is_usable(self) ? send_payloads(self, job, &payloads, timeout) : -EBADF;
	}
	return post_result(self, &payloads, job, result);
}

PyObject *calls_post_header_body(PyObject *object, PyObject *args)
{
	struct mcast_send_job job = { .count = 0 };
	PyObject *heads, *bodies, *imm, *given, *sent = NULL;
	Py_buffer head, body;
	unsigned long long serial;
	int64_t timeout;

	if (!PyArg_ParseTuple(args, "KIIOOOO", &serial, &job.remote_qp_num, &job.remote_qkey, &heads, &bodies, &imm,
			      &given))
		return NULL;
	if (!calls_read_timeout(given, &timeout))
		return calls_refuse_timeout(given);
	job.serial = serial;
	read_imm(imm, &job);
	if (PyObject_GetBuffer(heads, &head, PyBUF_ND))
		return NULL;
	if (!PyObject_GetBuffer(bodies, &body, PyBUF_ND)) {
		sent = post_rows((struct calls *)object, &job, &head, &body, timeout);
		PyBuffer_Release(&body);
	}
	PyBuffer_Release(&head);
	return sent;
}

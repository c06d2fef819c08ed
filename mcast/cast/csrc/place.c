/* Placer: puts the segments of a received batch into the memory of their blocks.
 *
 * Python opens a block when `place` first meets a segment of it, with the segments that are wanted and the memory for them,
 * and closes it when it assembles or drops the block. `place` handles the messages of a batch in order, and stops wherever
 * Python has something to decide before the next one: when a block whose SEAL is there has enough segments, before a segment
 * of a block that is not open, and behind messages that are no segments. So the receiver's state is at each message what it
 * would be if Python handled all of them.
 *
 * The placer belongs to one thread at a time; `busy` refuses calls of others while `place` runs without the GIL.
 */
#include "place.h"

#include <endian.h>
#include <string.h>

enum {
	RECORD_BYTES = 72, /* as RECORD_DTYPE of mcast/contract/batch.py */
	LENGTH_AT = 8,
	SRC_QP_AT = 12,
	SOURCE_AT = 32,
	GID_BYTES = 16,
	KIND_BYTES = 5, /* magic and kind, with which a DATA packet begins */
	WORDS = 3,      /* of a bitmap of MAX_K + MAX_PARITY segments */
	BUCKETS = 1024,
	MAX_PEERS = 64,
	WORTH_A_HAND_OVER = 16, /* messages: with fewer the GIL is kept */
	LINE = 64,
	FIRST_LINES = 4 * LINE,
};

struct peer {
	uint64_t session;
	uint8_t source[GID_BYTES];
};

struct block {
	struct block *next;    /* in its bucket */
	struct block *touched; /* next block of which messages have arrived in this call */
	uint64_t session;
	uint32_t object, number;
	uint8_t source[GID_BYTES]; /* of its peer */
	uint64_t wanted[WORDS], placed[WORDS];
	uint32_t messages; /* that have arrived in this call */
	uint32_t need;     /* segments with which Python can verify the block; 0 before its SEAL */
	uint32_t segment, k;
	Py_buffer memory, parity;
};

struct placer {
	PyObject_HEAD
	uint8_t kind[KIND_BYTES];
	int busy;
	int peers;
	struct peer peer[MAX_PEERS];
	struct block *buckets[BUCKETS];
};

struct record {
	uint64_t offset;
	uint32_t length;
	const uint8_t *sender; /* queue pair, and GID further on */
};

/* Segment of a DATA packet. */
struct segment {
	uint64_t session;
	uint32_t object, block, esi;
};

enum outcome { PLACED, COMPLETE, MISSING, OTHER, WRONG };

/* State of one call of `place`. */
struct call {
	const struct placer *placer;
	const uint8_t *records, *memory;
	uint64_t size; /* of the memory */
	Py_ssize_t at, count;
	struct block *last, *touched;
	/* Where it stopped: messages that Python handles, or those of a block to be opened. */
	enum outcome outcome;
	struct segment missing;
	Py_ssize_t run, step;
};

static uint32_t get32(const uint8_t *from)
{
	uint32_t value;

	memcpy(&value, from, sizeof(value));
	return be32toh(value);
}

static uint64_t get64(const uint8_t *from)
{
	uint64_t value;

	memcpy(&value, from, sizeof(value));
	return be64toh(value);
}

static size_t bucket(uint64_t session, uint32_t object, uint32_t block)
{
	return (session * 31 + object * UINT64_C(7919) + block) % BUCKETS;
}

static struct block *find(const struct placer *self, uint64_t session, uint32_t object, uint32_t block)
{
	struct block *found = self->buckets[bucket(session, object, block)];

	while (found && (found->number != block || found->object != object || found->session != session))
		found = found->next;
	return found;
}

static const struct peer *find_peer(const struct placer *self, uint64_t session)
{
	for (int index = 0; index < self->peers; index++)
		if (self->peer[index].session == session)
			return &self->peer[index];
	return NULL;
}

static struct record record_at(const struct call *call, Py_ssize_t index)
{
	const uint8_t *row = call->records + index * RECORD_BYTES;
	struct record found = { .sender = row };

	memcpy(&found.offset, row, sizeof(found.offset));
	memcpy(&found.length, row + LENGTH_AT, sizeof(found.length));
	found.offset = le64toh(found.offset);
	found.length = le32toh(found.length);
	return found;
}

static int is_same_sender(const struct record *one, const struct record *other)
{
	return !memcmp(one->sender + SRC_QP_AT, other->sender + SRC_QP_AT, sizeof(uint32_t)) &&
	       !memcmp(one->sender + SOURCE_AT, other->sender + SOURCE_AT, GID_BYTES);
}

/* The processor looks ahead as far as the page goes, and messages begin on others. */
static void prefetch(const struct call *call)
{
	if (call->at + 1 < call->count) {
		struct record next = record_at(call, call->at + 1);

		for (int line = 0; line < FIRST_LINES && next.offset < call->size; line += LINE)
			__builtin_prefetch(call->memory + next.offset + line);
	}
}

static void copy_segment(struct block *block, uint32_t esi, const uint8_t *data, size_t size)
{
	const Py_buffer *memory = esi < block->k ? &block->memory : &block->parity;
	size_t at = (size_t)(esi < block->k ? esi : esi - block->k) * block->segment, room = (size_t)memory->len;

	if (size > block->segment)
		size = block->segment;
	room = room > at ? room - at : 0;
	if (size > room)
		size = room;
	if (!size)
		return;
	for (size_t line = size; line < 2 * size && line < room; line += LINE) /* of the next segment */
		__builtin_prefetch((uint8_t *)memory->buf + at + line, 1);
	memcpy((uint8_t *)memory->buf + at, data, size);
	if (esi >= block->k) /* the code needs whole segments */
		memset((uint8_t *)memory->buf + at + size, 0, block->segment - size);
}

/* False for a parity segment without memory: Python gives a block that when it first needs any. */
static int has_room(const struct block *block, uint32_t esi)
{
	return esi < block->k || (Py_ssize_t)(esi - block->k + 1) * block->segment <= block->parity.len;
}

/* Read the header of a DATA packet of a known session; false for any other message. */
static int read_segment(const struct call *call, const struct record *record, struct segment *segment)
{
	const uint8_t *header = call->memory + record->offset;
	const struct peer *peer;

	if (record->length <= HEADER_BYTES || record->length > HEADER_BYTES + MAX_SEGMENT ||
	    memcmp(header, call->placer->kind, KIND_BYTES))
		return 0;
	segment->session = get64(header + SESSION_AT);
	segment->object = get32(header + OBJECT_AT);
	segment->block = get32(header + BLOCK_AT);
	segment->esi = (uint32_t)header[ESI_AT] << 8 | header[ESI_AT + 1];
	if (segment->block >= MAX_BLOCKS || segment->esi >= MAX_K + MAX_PARITY)
		return 0;
	peer = find_peer(call->placer, segment->session);
	return peer && !memcmp(record->sender + SOURCE_AT, peer->source, GID_BYTES);
}

static int is_same_block(const struct segment *one, const struct segment *other)
{
	return one->block == other->block && one->object == other->object && one->session == other->session;
}

static enum outcome place_one(struct call *call, const struct record *record)
{
	struct segment segment;
	struct block *block = call->last;
	uint64_t bit;

	if (!read_segment(call, record, &segment))
		return OTHER;
	if (!block || block->number != segment.block || block->object != segment.object || block->session != segment.session) {
		block = find(call->placer, segment.session, segment.object, segment.block);
		if (!block) {
			call->missing = segment;
			return MISSING;
		}
		call->last = block;
	}
	bit = UINT64_C(1) << segment.esi % 64;
	if (block->wanted[segment.esi / 64] & bit && !has_room(block, segment.esi))
		return OTHER;
	if (!block->messages++) {
		block->touched = call->touched;
		call->touched = block;
	}
	if (!(block->wanted[segment.esi / 64] & bit))
		return PLACED;
	block->wanted[segment.esi / 64] &= ~bit;
	block->placed[segment.esi / 64] |= bit;
	copy_segment(block, segment.esi, call->memory + record->offset + HEADER_BYTES, record->length - HEADER_BYTES);
	return block->need && !--block->need ? COMPLETE : PLACED;
}

static int is_inside(const struct call *call, const struct record *record)
{
	return record->length <= call->size && record->offset <= call->size - record->length;
}

/* Whether a message belongs to the run before it: to the same block, or, of those for Python, alike and equally far away. */
static int continues(const struct call *call, const struct record *record, const struct record *before)
{
	struct segment segment;
	int is_segment = read_segment(call, record, &segment);
	uint64_t step = record->offset - before->offset;

	if (call->outcome == MISSING)
		return is_segment && is_same_block(&segment, &call->missing);
	return !is_segment && record->length == before->length && is_same_sender(record, before) &&
	       record->offset > before->offset && step >= record->length && (call->run == 1 || step == (uint64_t)call->step);
}

static void find_run(struct call *call)
{
	struct record before = record_at(call, call->at), record;

	call->step = (Py_ssize_t)before.length;
	for (call->run = 1; call->at + call->run < call->count; call->run++, before = record) {
		record = record_at(call, call->at + call->run);
		if (!is_inside(call, &record) || !continues(call, &record, &before))
			return;
		if (call->outcome == OTHER)
			call->step = (Py_ssize_t)(record.offset - before.offset);
	}
}

static void place_all(struct call *call)
{
	while (call->at < call->count) {
		struct record record = record_at(call, call->at);

		if (!is_inside(call, &record)) {
			call->outcome = WRONG;
			return;
		}
		prefetch(call);
		call->outcome = place_one(call, &record);
		if (call->outcome == MISSING || call->outcome == OTHER) {
			find_run(call);
			return;
		}
		call->at++;
		if (call->outcome == COMPLETE)
			return;
	}
}

static int enter(struct placer *self)
{
	if (__atomic_exchange_n(&self->busy, 1, __ATOMIC_ACQUIRE)) {
		PyErr_SetString(PyExc_RuntimeError, "another call of this placer is running");
		return 0;
	}
	return 1;
}

static void pass_on(struct placer *self)
{
	__atomic_store_n(&self->busy, 0, __ATOMIC_RELEASE);
}

/* Report the blocks of which messages have arrived, the first one first. */
static PyObject *take_touched(struct call *call)
{
	PyObject *found = PyList_New(0);
	struct block *block, *before = NULL;

	for (block = call->touched; block;) { /* the last one is the first */
		struct block *next = block->touched;

		block->touched = before;
		before = block;
		block = next;
	}
	for (block = before; block; block = block->touched) {
		uint64_t placed[WORDS];
		PyObject *one;

		for (int word = 0; word < WORDS; word++)
			placed[word] = htole64(block->placed[word]);
		one = found ? Py_BuildValue("(KIIy#I)", (unsigned long long)block->session, block->object, block->number,
		                            (const char *)placed, (Py_ssize_t)sizeof(placed), block->messages)
		            : NULL;
		if (!one || PyList_Append(found, one))
			Py_CLEAR(found);
		Py_XDECREF(one);
		block->messages = 0;
		memset(block->placed, 0, sizeof(block->placed));
	}
	return found;
}

static PyObject *stopped_at(const struct call *call, PyObject *touched)
{
	const struct segment *segment = &call->missing;
	struct record first;

	if (call->outcome == MISSING)
		return Py_BuildValue("(nO(KII)n)", call->at, touched, (unsigned long long)segment->session, segment->object,
				     segment->block, call->run);
	if (call->outcome != OTHER)
		return Py_BuildValue("(nOOn)", call->at, touched, Py_None, (Py_ssize_t)0);
	first = record_at(call, call->at);
	return Py_BuildValue("(nO(Kn)n)", call->at, touched, (unsigned long long)first.offset, call->step, call->run);
}

static PyObject *place_batch(struct placer *self, const Py_buffer *records, const Py_buffer *memory, Py_ssize_t first)
{
	struct call call = {
		.placer = self,
		.records = records->buf,
		.memory = memory->buf,
		.size = (uint64_t)memory->len,
		.at = first,
		.count = records->len / RECORD_BYTES,
	};
	PyObject *touched, *result = NULL;

	if (records->len % RECORD_BYTES || first < 0 || first > call.count)
		return PyErr_Format(PyExc_ValueError, "there are no such records");
	if (call.count - first < WORTH_A_HAND_OVER) {
		place_all(&call);
	} else {
		Py_BEGIN_ALLOW_THREADS
		place_all(&call);
		Py_END_ALLOW_THREADS
	}
	touched = take_touched(&call);
	if (touched && call.outcome == WRONG)
		PyErr_SetString(PyExc_ValueError, "a record is outside of the memory");
	else if (touched)
		result = stopped_at(&call, touched);
	Py_XDECREF(touched);
	return result;
}

static PyObject *place(PyObject *object, PyObject *args)
{
	struct placer *self = (struct placer *)object;
	Py_buffer records, memory;
	PyObject *result = NULL;
	Py_ssize_t first;

	if (!PyArg_ParseTuple(args, "y*y*n:place", &records, &memory, &first))
		return NULL;
	if (enter(self)) {
		result = place_batch(self, &records, &memory, first);
		pass_on(self);
	}
	PyBuffer_Release(&memory);
	PyBuffer_Release(&records);
	return result;
}

static void free_block(struct block *block)
{
	PyBuffer_Release(&block->memory);
	PyBuffer_Release(&block->parity);
	PyMem_Free(block);
}

static void close_block(struct block **link)
{
	struct block *block = *link;

	*link = block->next;
	free_block(block);
}

static struct block **link_of(struct placer *self, uint64_t session, uint32_t object, uint32_t number)
{
	struct block **link = &self->buckets[bucket(session, object, number)];

	while (*link && ((*link)->number != number || (*link)->object != object || (*link)->session != session))
		link = &(*link)->next;
	return link;
}

static int get_buffer(PyObject *object, Py_buffer *buffer)
{
	return object == Py_None || !PyObject_GetBuffer(object, buffer, PyBUF_WRITABLE);
}

static PyObject *open_block(PyObject *object, PyObject *args)
{
	struct placer *self = (struct placer *)object;
	unsigned long long session;
	unsigned int of, number, segment, k, need;
	PyObject *memory, *parity;
	struct block **link, *block;
	const struct peer *peer;
	const char *wanted;
	Py_ssize_t size;

	if (!PyArg_ParseTuple(args, "KIIy#IOOII:open", &session, &of, &number, &wanted, &size, &need, &memory, &parity,
			      &segment, &k))
		return NULL;
	peer = find_peer(self, session);
	if (!peer || size != sizeof(block->wanted) || !k || k > MAX_K || !segment || segment > MAX_SEGMENT)
		return PyErr_Format(PyExc_ValueError, "there is no such block");
	block = PyMem_Calloc(1, sizeof(*block));
	if (!block)
		return PyErr_NoMemory();
	block->session = session;
	block->object = of;
	block->number = number;
	memcpy(block->source, peer->source, GID_BYTES);
	block->segment = segment;
	block->k = k;
	block->need = need;
	memcpy(block->wanted, wanted, sizeof(block->wanted));
	for (int word = 0; word < WORDS; word++)
		block->wanted[word] = le64toh(block->wanted[word]);
	block->wanted[WORDS - 1] &= (UINT64_C(1) << (MAX_K + MAX_PARITY) % 64) - 1;
	if (!get_buffer(memory, &block->memory) || !get_buffer(parity, &block->parity) || !enter(self)) {
		free_block(block);
		return NULL;
	}
	link = link_of(self, session, of, number);
	if (*link)
		close_block(link);
	block->next = *link;
	*link = block;
	pass_on(self);
	Py_RETURN_NONE;
}

static PyObject *close_one(PyObject *object, PyObject *args)
{
	struct placer *self = (struct placer *)object;
	unsigned long long session;
	unsigned int of, number;
	struct block **link;

	if (!PyArg_ParseTuple(args, "KII:close", &session, &of, &number) || !enter(self))
		return NULL;
	link = link_of(self, session, of, number);
	if (*link)
		close_block(link);
	pass_on(self);
	Py_RETURN_NONE;
}

static void close_session(struct placer *self, uint64_t session)
{
	for (int index = 0; index < BUCKETS; index++)
		for (struct block **link = &self->buckets[index]; *link;)
			if ((*link)->session == session)
				close_block(link);
			else
				link = &(*link)->next;
}

static PyObject *begin(PyObject *object, PyObject *args)
{
	struct placer *self = (struct placer *)object;
	unsigned long long session;
	const char *source;
	Py_ssize_t size;

	if (!PyArg_ParseTuple(args, "Ky#:begin", &session, &source, &size))
		return NULL;
	if (size != GID_BYTES || self->peers == MAX_PEERS || find_peer(self, session))
		return PyErr_Format(PyExc_ValueError, "there can be no such session");
	if (!enter(self))
		return NULL;
	self->peer[self->peers].session = session;
	memcpy(self->peer[self->peers].source, source, GID_BYTES);
	self->peers++;
	pass_on(self);
	Py_RETURN_NONE;
}

static PyObject *end(PyObject *object, PyObject *args)
{
	struct placer *self = (struct placer *)object;
	unsigned long long session;
	struct peer *peer;

	if (!PyArg_ParseTuple(args, "K:end", &session) || !enter(self))
		return NULL;
	close_session(self, session);
	peer = (struct peer *)find_peer(self, session);
	if (peer)
		*peer = self->peer[--self->peers];
	pass_on(self);
	Py_RETURN_NONE;
}

static PyObject *new_placer(PyTypeObject *type, PyObject *args, PyObject *names)
{
	struct placer *self;
	const char *header;
	Py_ssize_t size;

	if (!PyArg_ParseTuple(args, "y#:Placer", &header, &size))
		return NULL;
	if (size != HEADER_BYTES)
		return PyErr_Format(PyExc_ValueError, "a header of DATA has %d bytes", HEADER_BYTES);
	self = (struct placer *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
	if (self)
		memcpy(self->kind, header, KIND_BYTES);
	return (PyObject *)self;
}

static void free_placer(PyObject *object)
{
	struct placer *self = (struct placer *)object;
	PyTypeObject *type = Py_TYPE(object);

	for (int index = 0; index < BUCKETS; index++)
		while (self->buckets[index])
			close_block(&self->buckets[index]);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type);
}

static PyMethodDef placer_methods[] = {
	{ "begin", begin, METH_VARARGS, "Place segments of this session, if they come from this GID." },
	{ "end", end, METH_VARARGS, "Close all blocks of a session, and leave its messages to Python." },
	{ "open", open_block, METH_VARARGS, "Place the wanted segments of a block into this memory." },
	{ "close", close_one, METH_VARARGS, "Place no more segments of a block, and let its memory go." },
	{ "place", place, METH_VARARGS, "Place the segments of a batch, up to where Python has to decide." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot placer_slots[] = {
	{ Py_tp_new, new_placer },
	{ Py_tp_dealloc, free_placer },
	{ Py_tp_methods, placer_methods },
	{ Py_tp_doc, "Puts the segments of received batches into the memory of their blocks." },
	{ 0, NULL },
};

static PyType_Spec placer_spec = {
	.name = "mcast.cast._plane.Placer",
	.basicsize = sizeof(struct placer),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = placer_slots,
};

int add_placer(PyObject *module)
{
	PyObject *type = PyType_FromSpec(&placer_spec);
	int failed = !type || PyModule_AddObjectRef(module, "Placer", type);

	Py_XDECREF(type);
	return failed;
}

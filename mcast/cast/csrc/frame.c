#include "frame.h"

#include <string.h>

static int has_rows(const Py_buffer *memory, Py_ssize_t begin, Py_ssize_t step, Py_ssize_t count)
{
	return begin >= 0 && begin <= memory->len && count <= (memory->len - begin) / step;
}

/* Consecutive segments of an object. */
struct run {
	Py_ssize_t k, first, count, size;
	long long block;
};

/* Whether all of them have a number within its bounds: source segments lead to the next block, parity ends a block. */
static int is_bounded(const struct run *run)
{
	if (run->k <= 0 || run->k > MAX_K || run->first < 0 || run->count < 0 || run->count > MAX_RUN)
		return 0;
	if (run->size < 0 || run->size > MAX_SEGMENT || run->block < 0 || run->block >= MAX_BLOCKS)
		return 0;
	if (run->first >= run->k)
		return run->first <= MAX_K + MAX_PARITY - run->count;
	return run->block + (run->first + run->count - 1) / run->k < MAX_BLOCKS;
}

static void write_rows(uint8_t *to, const uint8_t *header, struct run run, const uint8_t *segments)
{
	for (Py_ssize_t left = run.count; left; left--) {
		memcpy(to, header, BLOCK_AT);
		put32(to + BLOCK_AT, (uint32_t)run.block);
		put16(to + ESI_AT, (uint16_t)run.first);
		to += HEADER_BYTES;
		if (run.size) {
			memcpy(to, segments, (size_t)run.size);
			to += run.size;
			segments += run.size;
		}
		if (++run.first == run.k) {
			run.first = 0;
			run.block++;
		}
	}
}

/* `blocks.frame_in_python` says what it does. */
static PyObject *frame(PyObject *module, PyObject *args)
{
	Py_ssize_t at, begin = 0;
	Py_buffer to, header, segments = { .len = 0 };
	PyObject *given = NULL;
	struct run run = { .size = 0 };
	int fit;

	if (!PyArg_ParseTuple(args, "w*ny*nLnn|Onn:frame", &to, &at, &header, &run.k, &run.block, &run.first, &run.count,
			      &given, &begin, &run.size))
		return NULL;
	if (given && PyObject_GetBuffer(given, &segments, PyBUF_SIMPLE)) {
		PyBuffer_Release(&header);
		PyBuffer_Release(&to);
		return NULL;
	}
	fit = header.len == HEADER_BYTES && is_bounded(&run) && has_rows(&to, at, HEADER_BYTES + run.size, run.count) &&
	      (!run.size || has_rows(&segments, begin, run.size, run.count));
	if (fit) {
		Py_BEGIN_ALLOW_THREADS
		write_rows((uint8_t *)to.buf + at, header.buf, run, run.size ? (const uint8_t *)segments.buf + begin : NULL);
		Py_END_ALLOW_THREADS
	}
	if (given)
		PyBuffer_Release(&segments);
	PyBuffer_Release(&header);
	PyBuffer_Release(&to);
	if (!fit)
		return PyErr_Format(PyExc_ValueError, "there are no such segments");
	Py_RETURN_NONE;
}

PyMethodDef frame_methods[] = {
	{ "frame", frame, METH_VARARGS, "Write the headers of consecutive segments, and the segments." },
	{ NULL, NULL, 0, NULL },
};

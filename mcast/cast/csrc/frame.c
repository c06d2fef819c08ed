#include "frame.h"

#include <string.h>

/* frame(to, at, header, k, block, first, count): write the headers of `count` segments into `to`, from byte `at` on.
 *
 * header: a header of the object, whose block and encoding symbol id are replaced
 * k:      source segments of a block: the next block follows its last one
 */
static PyObject *frame(PyObject *module, PyObject *args)
{
	Py_ssize_t at, k, first, count;
	Py_buffer to, header;
	long long block;
	int fit;

	if (!PyArg_ParseTuple(args, "w*ny*nLnn:frame", &to, &at, &header, &k, &block, &first, &count))
		return NULL;
	fit = header.len == HEADER_BYTES && k > 0 && k <= MAX_K && count >= 0 && first >= 0 && first < MAX_K + MAX_PARITY &&
	      at >= 0 && at <= to.len && count <= (to.len - at) / HEADER_BYTES && block >= 0 &&
	      block < MAX_BLOCKS - (first + count) / k;
	if (fit) {
		uint8_t *row = (uint8_t *)to.buf + at;
		const uint8_t *template = header.buf;

		Py_BEGIN_ALLOW_THREADS
		for (Py_ssize_t done = 0; done < count; done++, row += HEADER_BYTES) {
			memcpy(row, template, BLOCK_AT);
			put32(row + BLOCK_AT, (uint32_t)block);
			put16(row + ESI_AT, (uint16_t)first);
			if (++first == k) {
				first = 0;
				block++;
			}
		}
		Py_END_ALLOW_THREADS
	}
	PyBuffer_Release(&header);
	PyBuffer_Release(&to);
	if (!fit)
		return PyErr_Format(PyExc_ValueError, "there are no such segments");
	Py_RETURN_NONE;
}

PyMethodDef frame_methods[] = {
	{ "frame", frame, METH_VARARGS, "Write the headers of consecutive segments." },
	{ NULL, NULL, 0, NULL },
};

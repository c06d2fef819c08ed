/* Copies rows of bytes that begin at equal distances. `mcast/arguments/rows.py` does the same, slower, where this module was
 * not built. */
#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#if !defined(Py_LIMITED_API) && !defined(Py_GIL_DISABLED)
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include <string.h>

enum { WORTH_A_HAND_OVER = 65536, LINE = 64, FIRST_LINES = 4 * LINE };

static int has_rows(const Py_buffer *memory, Py_ssize_t begin, Py_ssize_t step, Py_ssize_t size, Py_ssize_t count)
{
	Py_ssize_t room = memory->len - begin;

	if (begin < 0 || size < 0 || count < 0 || step < size || room < 0)
		return 0;
	return !count || (room >= size && (!step || (room - size) / step >= count - 1));
}

/* The processor looks ahead as far as the page goes, and rows may begin on others. */
static void copy_row(char *to, Py_ssize_t apart, const char *of, Py_ssize_t step, Py_ssize_t size)
{
	for (Py_ssize_t line = 0; line < size && line < FIRST_LINES; line += LINE) {
		__builtin_prefetch(of + step + line);
		__builtin_prefetch(to + apart + line, 1);
	}
	memmove(to, of, (size_t)size);
}

/* For Python there is no other way that makes nothing for each row. */
static PyObject *copy_rows(PyObject *module, PyObject *args)
{
	Py_ssize_t at, apart, begin, step, size, count;
	PyThreadState *others = NULL;
	Py_buffer to, of;
	int fit;

	if (!PyArg_ParseTuple(args, "w*nny*nnnn:copy_rows", &to, &at, &apart, &of, &begin, &step, &size, &count))
		return NULL;
	fit = has_rows(&to, at, apart, size, count) && has_rows(&of, begin, step, size, count);
	if (fit && count && size >= WORTH_A_HAND_OVER / count)
		others = PyEval_SaveThread();
	for (Py_ssize_t row = 0; fit && row < count; row++)
		copy_row((char *)to.buf + at + row * apart, apart, (char *)of.buf + begin + row * step, step, size);
	if (others)
		PyEval_RestoreThread(others);
	PyBuffer_Release(&of);
	PyBuffer_Release(&to);
	if (!fit)
		return PyErr_Format(PyExc_ValueError, "there are no such rows");
	Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
	{ "copy_rows", copy_rows, METH_VARARGS, "Copy rows of bytes that begin at equal distances." },
	{ NULL, NULL, 0, NULL },
};

static struct PyModuleDef definition = {
	PyModuleDef_HEAD_INIT,
	.m_name = "_rows",
	.m_size = -1,
	.m_methods = methods,
};

PyMODINIT_FUNC PyInit__rows(void)
{
	PyObject *module = PyModule_Create(&definition);

#ifdef Py_GIL_DISABLED
	if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED))
		Py_CLEAR(module);
#endif
	return module;
}

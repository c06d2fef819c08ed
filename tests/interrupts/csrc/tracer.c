/*
 * Makes an exception pending at the n-th line, or bytecode, that a call executes in files below a folder.
 *
 * A trace function that raises reaches places that no signal reaches, such as the one between the end of a
 * `with` and its `__exit__`. So this one only asks the interpreter to raise, by the functions that a signal's
 * arrival and another thread use, and the interpreter raises where it would anyway.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>

static struct {
	PyObject *folder;   /* only files whose name begins with this count */
	PyObject *error;    /* the class of an asynchronous exception, or NULL: a signal */
	long at, seen;
	unsigned long thread;
	int number;         /* of the signal */
	int opcodes;        /* whether bytecodes count, and not lines */
} now;

static int is_ours(PyFrameObject *frame)
{
	PyCodeObject *code = PyFrame_GetCode(frame);
	Py_ssize_t found = PyUnicode_Tailmatch(code->co_filename, now.folder, 0, PY_SSIZE_T_MAX, -1);

	Py_DECREF(code);
	return found > 0;
}

static int make_pending(void)
{
	if (now.error != NULL)
		return PyThreadState_SetAsyncExc(now.thread, now.error) == 1 ? 0 : -1;
	return PyErr_SetInterruptEx(now.number);
}

static int trace(PyObject *unused, PyFrameObject *frame, int what, PyObject *arg)
{
	(void)unused;
	(void)arg;
	if (now.seen >= now.at)
		return 0;
	if (what == PyTrace_CALL && now.opcodes && is_ours(frame))
		return PyObject_SetAttrString((PyObject *)frame, "f_trace_opcodes", Py_True);
	if (what != (now.opcodes ? PyTrace_OPCODE : PyTrace_LINE) || !is_ours(frame))
		return 0;
	now.seen++;
	return now.seen == now.at ? make_pending() : 0;
}

/* 3.12 asks for the events of bytecodes only if some frame wanted them before tracing began. */
static int want_opcodes(PyObject *wanted)
{
	PyFrameObject *frame = PyEval_GetFrame();

	if (PY_VERSION_HEX < 0x030C0000 || PY_VERSION_HEX >= 0x030D0000 || frame == NULL)
		return 0;
	return PyObject_SetAttrString((PyObject *)frame, "f_trace_opcodes", wanted);
}

static PyObject *raised(void)
{
#if PY_VERSION_HEX >= 0x030C0000
	return PyErr_GetRaisedException();
#else
	PyObject *type, *value, *where;

	PyErr_Fetch(&type, &value, &where);
	if (type == NULL)
		return NULL;
	PyErr_NormalizeException(&type, &value, &where);
	if (where != NULL)
		PyException_SetTraceback(value, where);
	Py_DECREF(type);
	Py_XDECREF(where);
	return value;
#endif
}

/* run(call, settle, folder, at, signal or exception's class, opcodes) -> (seen, error or None).
 *
 * `settle` is a Python function that does nothing: what is pending at the end of `call` is raised there. */
static PyObject *run(PyObject *module, PyObject *args)
{
	PyObject *call, *settle, *folder, *kind, *result, *error, *later;
	long at;
	int opcodes;

	(void)module;
	if (!PyArg_ParseTuple(args, "OOUlOp", &call, &settle, &folder, &at, &kind, &opcodes))
		return NULL;
	now.folder = folder;
	now.error = PyLong_Check(kind) ? NULL : kind;
	now.number = PyLong_Check(kind) ? (int)PyLong_AsLong(kind) : 0;
	now.at = at;
	now.seen = 0;
	now.opcodes = opcodes;
	now.thread = PyThread_get_thread_ident();
	if (opcodes && want_opcodes(Py_True))
		return NULL;
	PyEval_SetTrace(trace, NULL);
	result = PyObject_CallNoArgs(call);
	PyEval_SetTrace(NULL, NULL);
	now.at = 0;
	error = result == NULL ? raised() : NULL;
	Py_XDECREF(result);
	result = PyObject_CallNoArgs(settle);
	later = result == NULL ? raised() : NULL;
	Py_XDECREF(result);
	if (opcodes && want_opcodes(Py_False))
		return NULL;
	if (later != NULL) {
		Py_XDECREF(error);
		error = later;
	}
	return Py_BuildValue("lN", now.seen, error != NULL ? error : Py_NewRef(Py_None));
}

static PyMethodDef methods[] = {
	{"run", run, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
	{Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
	{0, NULL},
};

static struct PyModuleDef definition = {
	PyModuleDef_HEAD_INIT, "_tracer", NULL, 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__tracer(void)
{
	return PyModuleDef_Init(&definition);
}

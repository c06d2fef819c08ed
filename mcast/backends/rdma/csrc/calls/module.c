/* The module of the calls, a second one in the same library as cffi's: `calls.py` loads it. */
#include "calls.h"

static void after_fork(void)
{
	mcast_signals_after_fork();
	mcast_async_after_fork();
}

static PyObject *set_up(PyObject *module, PyObject *args)
{
	PyObject *queue_pair, *batch, *set_wakeup_fd;
	unsigned long main_thread;
	struct known given;

	if (!PyArg_ParseTuple(args, "OOOOOOk", &queue_pair, &batch, &given.batch, &given.message, &given.gid, &set_wakeup_fd,
			      &main_thread) ||
	    mcast_set_up_signals(set_wakeup_fd, main_thread) || calls_know(queue_pair, batch, &given))
		return NULL;
	Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
	{ "set_up", set_up, METH_VARARGS, "the contract's classes QueuePair and Batch, the provider's batch, Message, Gid, "
	  "signal.set_wakeup_fd, the main thread's ident" },
	{ "wait_event", calls_wait_event, METH_VARARGS, "sleep until an event waits at a channel" },
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

#ifdef Py_GIL_DISABLED
	if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED))
		Py_CLEAR(module);
#endif
	if (!module || !calls || !lease || lease_make_types() || PyModule_AddObjectRef(module, "Calls", calls) ||
	    PyModule_AddObjectRef(module, "Lease", lease) || pthread_atfork(NULL, NULL, after_fork))
		Py_CLEAR(module);
	Py_XDECREF(calls);
	Py_XDECREF(lease);
	return module;
}


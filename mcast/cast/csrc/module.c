/* mcast.cast._plane: framing and placement of batches of segments. */
#include "frame.h"
#include "place.h"

static struct PyModuleDef definition = {
	PyModuleDef_HEAD_INIT,
	.m_name = "_plane",
	.m_size = -1,
};

PyMODINIT_FUNC PyInit__plane(void)
{
	PyObject *module = PyModule_Create(&definition);

	if (module && (PyModule_AddFunctions(module, frame_methods) || add_placer(module)))
		Py_CLEAR(module);
#ifdef Py_GIL_DISABLED
	if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED))
		Py_CLEAR(module);
#endif
	return module;
}

/* When SIGINT may end a call, in C. `mcast/interrupts/__init__.py` says what is promised; `by_exchange.py` does the same
 * where this module was not built.
 *
 * This module's handler, set by sigaction, stands in front of Python's. While SIGINT is held back the handler notes the
 * signal, otherwise it passes the signal on. So signal.getsignal() returns Python's handler as always, and holding a
 * signal back costs no system call. A program that sets a handler puts it in front of this module's. So each block asks
 * for Python's handler, and if that is another one this module's goes in front again. A handler that was set and taken
 * back meanwhile is noticed at the clock's next tick.
 *
 * CPython 3.14 takes a signal at the end of a call of `__enter__`, where a handler may raise and no `__exit__` follows
 * (python/cpython#148874); versions before and after do not. There `__enter__` takes what has come before, and that of a
 * lock holds SIGINT back until the block has begun. That leaves, for other signals and objects, what comes in the last
 * instructions of the call. */
#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#if !defined(Py_LIMITED_API) && !defined(Py_GIL_DISABLED)
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { TAKEN, HELD, CAME }; /* what becomes of SIGINT; CAME: the signal is held back, and one has come */
enum { SIGNALLED = 1, RUNG = 2 }; /* what a bell tells */

static int state;		  /* atomic: other threads may get a signal, too */
static int *asleep_on;		  /* atomic: the bell that the main thread waits for, or NULL */
static int depth;		  /* of blocks, one in the other, in the main thread */
static pthread_t main_thread;
static struct sigaction behind;	  /* the handler that ours stands in front of */
static struct sigaction first;	  /* the one of the first time */
static int passed_on;		  /* atomic: how many handlers behind are at work */
static PyObject *getsignal, *sigint, *seen; /* `seen`: Python's handler when ours was last found to be in front */
static int seen_holdable;
static struct timespec seen_at;
static int may_miss_exit; /* whether this is CPython 3.14 */

static int is_main(void)
{
	return pthread_equal(pthread_self(), main_thread);
}

static void tell(int *bell, int what)
{
	__atomic_or_fetch(bell, what, __ATOMIC_SEQ_CST);
	syscall(SYS_futex, bell, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* A handler that was put in front of this module's, and is now behind it again, may pass the signal on to this module's.
 * Then the first handler gets it. */
static void pass_on(int number, siginfo_t *info, void *context)
{
	int before = __atomic_fetch_add(&passed_on, 1, __ATOMIC_SEQ_CST);
	const struct sigaction *to = before ? &first : &behind;

	if (before > 1)
		; /* the first one passes it on, too */
	else if (to->sa_flags & SA_SIGINFO)
		to->sa_sigaction(number, info, context);
	else
		to->sa_handler(number);
	__atomic_sub_fetch(&passed_on, 1, __ATOMIC_SEQ_CST);
}

/* The handler. */
static void on_sigint(int number, siginfo_t *info, void *context)
{
	int saved = errno, held = HELD, *bell;

	if (!__atomic_compare_exchange_n(&state, &held, CAME, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
		__atomic_store_n(&state, TAKEN, __ATOMIC_SEQ_CST); /* the second one is taken at once */
		pass_on(number, info, context);
	}
	bell = __atomic_load_n(&asleep_on, __ATOMIC_SEQ_CST);
	if (bell)
		tell(bell, SIGNALLED);
	errno = saved;
}

/* Go in front if another is there: 1. 0: nothing would be raised, -1: an error. */
static int go_in_front(PyObject *handler)
{
	struct sigaction now;

	if (!PyCallable_Check(handler))
		return 0;
	if (sigaction(SIGINT, NULL, &now))
		goto failed;
	if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_sigint)
		return 1;
	if (!(now.sa_flags & SA_SIGINFO) && (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN))
		return 0;
	if (!behind.sa_handler)
		first = now;
	behind = now;
	now.sa_sigaction = on_sigint;
	now.sa_flags |= SA_SIGINFO;
	if (!sigaction(SIGINT, &now, NULL))
		return 1;
failed:
	PyErr_SetFromErrno(PyExc_OSError);
	return -1;
}

/* As above; without a system call if nothing tells of another handler. */
static int stay_in_front(void)
{
	PyObject *handler = PyObject_Call(getsignal, sigint, NULL);
	struct timespec now;

	if (!handler)
		return -1;
	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	if (handler != seen || now.tv_nsec != seen_at.tv_nsec || now.tv_sec != seen_at.tv_sec) {
		PyObject *before = seen;

		seen_holdable = go_in_front(handler);
		if (seen_holdable < 0) {
			Py_DECREF(handler);
			return -1;
		}
		seen = Py_NewRef(handler);
		seen_at = now;
		Py_XDECREF(before);
	}
	Py_DECREF(handler);
	return seen_holdable;
}

/* Take what has come: Python's handlers run. -1: one raised. */
static int take(void)
{
	raise(SIGINT);
	return PyErr_CheckSignals();
}

static int stop_holding(void)
{
	return __atomic_exchange_n(&state, TAKEN, __ATOMIC_SEQ_CST) == CAME ? take() : 0;
}

/* Hold SIGINT back from here on; one that came before is taken here: -1 if a handler raises. */
static int hold(void)
{
	int holdable = stay_in_front();

	if (holdable > 0)
		__atomic_store_n(&state, HELD, __ATOMIC_SEQ_CST);
	return holdable < 0 ? -1 : PyErr_CheckSignals();
}

static int enter(void)
{
	if (!is_main() || !(depth++ ? may_miss_exit && PyErr_CheckSignals() : hold()))
		return 0;
	if (!--depth)
		__atomic_store_n(&state, TAKEN, __ATOMIC_SEQ_CST);
	return -1;
}

static int leave(void)
{
	return is_main() && depth && !--depth ? stop_holding() : 0;
}

/* The error that is set has come while another was dealt with, which this takes. */
static void follow(PyObject *type, PyObject *value, PyObject *trace)
{
	PyObject *new_type, *new_value, *new_trace;

	PyErr_Fetch(&new_type, &new_value, &new_trace);
	PyErr_NormalizeException(&type, &value, &trace);
	PyErr_NormalizeException(&new_type, &new_value, &new_trace);
	if (value && new_value && value != new_value)
		PyException_SetContext(new_value, Py_NewRef(value));
	Py_XDECREF(type);
	Py_XDECREF(value);
	Py_XDECREF(trace);
	PyErr_Restore(new_type, new_value, new_trace);
}

/* Leave with an error set; what is raised here comes in its place. */
static void leave_with_error(void)
{
	PyObject *type, *value, *trace;

	PyErr_Fetch(&type, &value, &trace);
	if (leave())
		follow(type, value, trace);
	else
		PyErr_Restore(type, value, trace);
}

/* Call what may end something, as a destructor does: Ctrl-C, which cannot be raised in one, is taken afterwards, and what
 * it has ended in spite of that is called once more. -1: with the error. */
static int call_whole(int (*step)(PyObject *), PyObject *what)
{
	int main_holds = is_main() && !depth++, interrupted = 0, failed;

	if (main_holds && seen_holdable)
		__atomic_store_n(&state, HELD, __ATOMIC_SEQ_CST);
	failed = step(what);
	if (failed && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
		PyErr_Clear();
		interrupted = 1;
		failed = step(what);
	}
	if (is_main()) {
		depth--;
		if (main_holds && __atomic_exchange_n(&state, TAKEN, __ATOMIC_SEQ_CST) == CAME)
			interrupted = 1;
		if (interrupted)
			raise(SIGINT);
	}
	return failed;
}

static unsigned forks; /* by which this process has come about, from that which has loaded this */
static unsigned long forker; /* the thread of the last one */
static pthread_mutex_t inheriting = PTHREAD_MUTEX_INITIALIZER;

/* In a fork the thread that has forked is the main one, and holds nothing if it was another before. */
static void after_fork(void)
{
	forks++;
	forker = PyThread_get_thread_ident();
	inheriting = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	if (is_main())
		return;
	main_thread = pthread_self();
	depth = 0;
	asleep_on = NULL;
	state = TAKEN;
}

/* --- what is put off --- */

/* Of this thread, by level: how many locks it holds, each as often as it has taken it; and what waits for the last one. */
enum { LEVELS = 2 };
static __thread unsigned long locks_held[LEVELS];
static __thread PyObject *put_off[LEVELS]; /* lists, or NULL */

static int is_busy(int level)
{
	return locks_held[0] || (level && locks_held[1]);
}

static int call(PyObject *function)
{
	PyObject *found = PyObject_CallNoArgs(function);

	Py_XDECREF(found);
	return found ? 0 : -1;
}

/* There is nobody to raise an error to. It may be of a signal's handler, which ran in the midst of the function and has
 * ended that: the function is called once more. */
static void call_all(PyObject *functions)
{
	for (Py_ssize_t i = 0; i < PyList_Size(functions); i++) {
		PyObject *function = PyList_GetItem(functions, i), *type, *value, *trace;

		if (!call_whole(call, function))
			continue;
		PyErr_Fetch(&type, &value, &trace);
		if (call_whole(call, function))
			PyErr_Clear();
		PyErr_Restore(type, value, trace);
		PyErr_WriteUnraisable(function);
	}
	Py_DECREF(functions);
}

static void catch_up(void)
{
	PyObject *type, *value, *trace, *functions;

	PyErr_Fetch(&type, &value, &trace);
	for (int level = 0; level < LEVELS; level++)
		while ((functions = put_off[level]) && !is_busy(level)) {
			put_off[level] = NULL;
			call_all(functions);
		}
	PyErr_Restore(type, value, trace);
}

static PyObject *later(PyObject *module, PyObject *arguments)
{
	PyObject *function;
	int level = 0;

	if (!PyArg_ParseTuple(arguments, "O|i:later", &function, &level))
		return NULL;
	if (level < 0 || level >= LEVELS)
		return PyErr_Format(PyExc_ValueError, "level %d: there are 0 and 1", level);
	if (!is_busy(level))
		return PyBool_FromLong(0);
	if (!put_off[level] && !(put_off[level] = PyList_New(0)))
		return NULL;
	return PyList_Append(put_off[level], function) ? NULL : PyBool_FromLong(1);
}

static PyObject *is_within(PyObject *module, PyObject *unused)
{
	return PyBool_FromLong(is_busy(0));
}

/* The locks are held on, and do not count meanwhile: what is called may take them again. */
static PyObject *do_what_was_put_off(PyObject *module, PyObject *unused)
{
	unsigned long before = locks_held[0];

	if (put_off[0] || put_off[1]) {
		locks_held[0] = 0;
		catch_up();
		locks_held[0] = before;
	}
	Py_RETURN_NONE;
}

/* --- Lock --- */

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static PyObject *lock_type;

struct lock {
	PyObject_HEAD
	PyThread_type_lock lock;
	unsigned long owner; /* atomic; 0: nobody */
	unsigned long count; /* of times that the owner has taken it: the owner's alone */
	unsigned forks;	     /* atomic; those after which it was taken last */
	int level;	     /* -1: the lock puts nothing off */
	PyObject *refusal;   /* what an owner is told who takes the lock once more; NULL: an owner may */
};

static PyObject *new_lock(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
	struct lock *self;
	PyObject *given = NULL, *refusal = NULL;
	long level;

	if (!PyArg_ParseTuple(arguments, "|OU:Lock", &given, &refusal))
		return NULL;
	level = given && given != Py_None ? PyLong_AsLong(given) : 0;
	if (PyErr_Occurred())
		return NULL;
	if (level < 0 || level >= LEVELS)
		return PyErr_Format(PyExc_ValueError, "level %ld: there are 0, 1 and None", level);
	self = (struct lock *)PyType_GenericAlloc(type, 0);
	if (self) {
		self->level = given == Py_None ? -1 : (int)level;
		self->forks = forks;
		self->refusal = Py_XNewRef(refusal);
	}
	if (self && !(self->lock = PyThread_allocate_lock())) {
		Py_CLEAR(self);
		PyErr_NoMemory();
	}
	return (PyObject *)self;
}

static void free_lock(PyObject *object)
{
	struct lock *self = (struct lock *)object;
	PyTypeObject *type = Py_TYPE(object);

	if (self->lock)
		PyThread_free_lock(self->lock);
	Py_XDECREF(self->refusal);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
	Py_DECREF(type);
}

/* Wait for the lock, so many seconds or (-1) without end. 1: taken, 0: too late, -1: a signal's handler raised. */
static int wait_for_lock(struct lock *self, double timeout)
{
	double end = now() + timeout;
	PyLockStatus status;

	do {
		long long left = timeout < 0 ? -1 : end > now() ? (long long)((end - now()) * 1e6) : 0;

		Py_BEGIN_ALLOW_THREADS
		status = PyThread_acquire_lock_timed(self->lock, left, 1);
		Py_END_ALLOW_THREADS
		if (status == PY_LOCK_INTR && PyErr_CheckSignals())
			return -1;
	} while (status == PY_LOCK_INTR);
	return status == PY_LOCK_ACQUIRED;
}

static int is_mine(const struct lock *self)
{
	return __atomic_load_n(&self->owner, __ATOMIC_RELAXED) == PyThread_get_thread_ident();
}

/* A thread that held the lock when another one forked is the parent's: here nobody would release it. */
static void inherit(struct lock *self)
{
	pthread_mutex_lock(&inheriting);
	if (self->forks != forks) {
		if (__atomic_load_n(&self->owner, __ATOMIC_RELAXED) != forker) {
			PyThread_acquire_lock(self->lock, 0);
			self->count = 0;
			__atomic_store_n(&self->owner, 0, __ATOMIC_RELAXED);
			PyThread_release_lock(self->lock);
		}
		__atomic_store_n(&self->forks, forks, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&inheriting);
}

static int lock(struct lock *self, double timeout)
{
	int taken = 1;

	if (__atomic_load_n(&self->forks, __ATOMIC_ACQUIRE) != forks)
		inherit(self);
	if (!is_mine(self)) {
		if (!PyThread_acquire_lock(self->lock, 0))
			taken = timeout ? wait_for_lock(self, timeout) : 0;
		if (taken <= 0)
			return taken;
		__atomic_store_n(&self->owner, PyThread_get_thread_ident(), __ATOMIC_RELAXED);
	} else if (self->refusal) {
		PyErr_SetObject(PyExc_RuntimeError, self->refusal);
		return -1;
	}
	self->count++;
	if (self->level >= 0)
		locks_held[self->level]++;
	return 1;
}

static int unlock(struct lock *self)
{
	if (!is_mine(self)) {
		PyErr_SetString(PyExc_RuntimeError, "cannot release un-acquired lock");
		return -1;
	}
	if (!--self->count) {
		__atomic_store_n(&self->owner, 0, __ATOMIC_RELAXED);
		PyThread_release_lock(self->lock);
	}
	if (self->level >= 0 && !--locks_held[self->level] && (put_off[0] || put_off[1]))
		catch_up();
	return 0;
}

static PyObject *acquire(PyObject *object, PyObject *arguments, PyObject *keywords)
{
	static char *parameters[] = { "blocking", "timeout", NULL };
	double seconds = -1;
	int blocking = 1, taken;

	if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|pd:acquire", parameters, &blocking, &seconds))
		return NULL;
	taken = lock((struct lock *)object, !blocking ? 0 : seconds < 0 ? -1 : seconds);
	return taken < 0 ? NULL : PyBool_FromLong(taken);
}

static PyObject *release(PyObject *object, PyObject *unused)
{
	if (unlock((struct lock *)object))
		return NULL;
	Py_RETURN_NONE;
}

/* Python calls this at the end of the call of `__enter__`; a signal that is sent here is taken in the block. */
static int begin_block(void *unused)
{
	if (depth && !--depth && __atomic_exchange_n(&state, TAKEN, __ATOMIC_SEQ_CST) == CAME)
		raise(SIGINT);
	return 0;
}

/* -1: what has come before raises. */
static int hold_until_begun(void)
{
	if (enter())
		return -1;
	if (depth > 1 || Py_AddPendingCall(begin_block, NULL))
		begin_block(NULL); /* another block holds SIGINT back, or too many calls wait */
	return 0;
}

static PyObject *enter_lock(PyObject *object, PyObject *unused)
{
	if (lock((struct lock *)object, -1) < 0)
		return NULL;
	if (may_miss_exit && is_main() && hold_until_begun()) {
		unlock((struct lock *)object);
		return NULL;
	}
	Py_RETURN_NONE;
}

static PyObject *leave_lock(PyObject *object, PyObject *const *error, Py_ssize_t count)
{
	return release(object, NULL);
}

static PyObject *is_owned(PyObject *object, PyObject *unused)
{
	return PyBool_FromLong(is_mine((struct lock *)object));
}

static PyObject *release_save(PyObject *object, PyObject *unused)
{
	struct lock *self = (struct lock *)object;
	unsigned long count = 0;

	if (is_mine(self)) {
		count = self->count;
		self->count = 1;
		if (self->level >= 0)
			locks_held[self->level] -= count - 1;
	}
	return unlock(self) ? NULL : PyLong_FromUnsignedLong(count);
}

static PyObject *acquire_restore(PyObject *object, PyObject *saved)
{
	struct lock *self = (struct lock *)object;
	unsigned long count = PyLong_AsUnsignedLong(saved);

	if (PyErr_Occurred() || lock(self, -1) < 0)
		return NULL;
	self->count = count;
	if (self->level >= 0)
		locks_held[self->level] += count - 1;
	Py_RETURN_NONE;
}

static PyMethodDef lock_methods[] = {
	{ "acquire", (PyCFunction)(void (*)(void))acquire, METH_VARARGS | METH_KEYWORDS, NULL },
	{ "release", release, METH_NOARGS, NULL },
	{ "__enter__", enter_lock, METH_NOARGS, NULL },
	{ "__exit__", (PyCFunction)(void (*)(void))leave_lock, METH_FASTCALL, NULL },
	{ "_is_owned", is_owned, METH_NOARGS, NULL },
	{ "_release_save", release_save, METH_NOARGS, NULL },
	{ "_acquire_restore", acquire_restore, METH_O, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot lock_slots[] = {
	{ Py_tp_doc, "Lock(level=0, refusal=None): threading.RLock, whose holder `later` knows." },
	{ Py_tp_new, new_lock },
	{ Py_tp_dealloc, free_lock },
	{ Py_tp_methods, lock_methods },
	{ 0, NULL },
};

static PyType_Spec lock_spec = {
	.name = "mcast.interrupts._interrupts.Lock",
	.basicsize = sizeof(struct lock),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = lock_slots,
};

/* --- uninterrupted --- */

struct block {
	PyObject_HEAD
	struct lock *lock;	     /* what is held, too; or NULL */
	PyObject *acquire, *release; /* of a lock of another kind; or NULL */
};

static PyObject *bare; /* the only block without a lock: such a block has no state */

static PyObject *new_block(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
	PyObject *lock = NULL;
	struct block *self;

	if (bare && !PyTuple_Size(arguments) && !keywords)
		return Py_NewRef(bare);
	if (!PyArg_ParseTuple(arguments, "|O:uninterrupted", &lock))
		return NULL;
	self = (struct block *)PyType_GenericAlloc(type, 0);
	if (!self || !lock)
		return (PyObject *)self;
	if ((PyObject *)Py_TYPE(lock) == lock_type) {
		self->lock = (struct lock *)Py_NewRef(lock);
		return (PyObject *)self;
	}
	self->acquire = PyObject_GetAttrString(lock, "acquire");
	self->release = PyObject_GetAttrString(lock, "release");
	if (!self->acquire || !self->release)
		Py_CLEAR(self);
	return (PyObject *)self;
}

static void free_block(PyObject *object)
{
	struct block *self = (struct block *)object;
	PyTypeObject *type = Py_TYPE(object);

	PyObject_GC_UnTrack(object);
	Py_XDECREF((PyObject *)self->lock);
	Py_XDECREF(self->acquire);
	Py_XDECREF(self->release);
	PyObject_GC_Del(object);
	Py_DECREF(type);
}

static int visit_block(PyObject *object, visitproc visit, void *arg)
{
	struct block *self = (struct block *)object;

	Py_VISIT(Py_TYPE(object));
	Py_VISIT((PyObject *)self->lock);
	Py_VISIT(self->acquire);
	Py_VISIT(self->release);
	return 0;
}

static PyObject *enter_block(PyObject *object, PyObject *unused)
{
	struct block *self = (struct block *)object;

	if (enter())
		return NULL;
	if ((self->lock && lock(self->lock, -1) < 0) || (self->acquire && call(self->acquire))) {
		leave_with_error();
		return NULL;
	}
	Py_RETURN_NONE;
}

static PyObject *leave_block(PyObject *object, PyObject *const *error, Py_ssize_t count)
{
	struct block *self = (struct block *)object;

	if ((self->lock && unlock(self->lock)) || (self->release && call(self->release))) {
		leave_with_error();
		return NULL;
	}
	if (leave())
		return NULL;
	Py_RETURN_NONE;
}

static PyMethodDef block_methods[] = {
	{ "__enter__", enter_block, METH_NOARGS, NULL },
	{ "__exit__", (PyCFunction)(void (*)(void))leave_block, METH_FASTCALL, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot block_slots[] = {
	{ Py_tp_doc, "`with` it: SIGINT waits for the end of the block, which holds `lock` if there is one." },
	{ Py_tp_new, new_block },
	{ Py_tp_dealloc, free_block },
	{ Py_tp_traverse, visit_block },
	{ Py_tp_methods, block_methods },
	{ 0, NULL },
};

static PyType_Spec block_spec = {
	.name = "mcast.interrupts._interrupts.uninterrupted",
	.basicsize = sizeof(struct block),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = block_slots,
};

/* --- interruptible --- */

struct lifted {
	PyObject_HEAD
	int depth; /* of the blocks that this one lifts */
};

static PyObject *enter_lifted(PyObject *object, PyObject *unused)
{
	struct lifted *self = (struct lifted *)object;

	self->depth = is_main() ? depth : 0;
	if (self->depth) {
		depth = 0;
		if (stop_holding()) {
			depth = self->depth;
			__atomic_store_n(&state, HELD, __ATOMIC_SEQ_CST);
			return NULL;
		}
	}
	Py_RETURN_NONE;
}

static PyObject *leave_lifted(PyObject *object, PyObject *const *error, Py_ssize_t count)
{
	struct lifted *self = (struct lifted *)object;

	if (self->depth) {
		depth = self->depth;
		if (hold())
			return NULL; /* the block around it holds what comes now */
	}
	Py_RETURN_NONE;
}

static PyMethodDef lifted_methods[] = {
	{ "__enter__", enter_lifted, METH_NOARGS, NULL },
	{ "__exit__", (PyCFunction)(void (*)(void))leave_lifted, METH_FASTCALL, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot lifted_slots[] = {
	{ Py_tp_doc, "`with` it, around what waits inside an `uninterrupted` block: SIGINT is taken at once." },
	{ Py_tp_methods, lifted_methods },
	{ 0, NULL },
};

static PyType_Spec lifted_spec = {
	.name = "mcast.interrupts._interrupts.interruptible",
	.basicsize = sizeof(struct lifted),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = lifted_slots,
};

static PyObject *take_interrupt(PyObject *module, PyObject *unused)
{
	int failed;

	if (is_main() && __atomic_load_n(&state, __ATOMIC_SEQ_CST) == CAME) {
		failed = stop_holding();
		__atomic_store_n(&state, HELD, __ATOMIC_SEQ_CST);
		if (failed)
			return NULL;
	}
	Py_RETURN_NONE;
}

static PyObject *is_held(PyObject *module, PyObject *unused)
{
	return PyBool_FromLong(is_main() && __atomic_load_n(&state, __ATOMIC_SEQ_CST) != TAKEN);
}

/* --- Bell --- */

struct bell {
	PyObject_HEAD
	int told; /* atomic */
};

static PyObject *ring(PyObject *object, PyObject *unused)
{
	tell(&((struct bell *)object)->told, RUNG);
	Py_RETURN_NONE;
}

static void sleep_until_told(int *bell, const struct timespec *left)
{
	Py_BEGIN_ALLOW_THREADS
	syscall(SYS_futex, bell, FUTEX_WAIT_PRIVATE, 0, left, NULL, 0);
	Py_END_ALLOW_THREADS
}

/* A signal that comes between the look for one and the sleep has told the bell, so nobody sleeps. */
static int wait_for(int *bell, double timeout)
{
	double end = now() + timeout, left = timeout;
	int waits = left > 0;

	do {
		struct timespec time = { .tv_sec = (time_t)left, .tv_nsec = (long)((left - (double)(time_t)left) * 1e9) };

		__atomic_and_fetch(bell, ~SIGNALLED, __ATOMIC_SEQ_CST);
		if (PyErr_CheckSignals())
			return -1;
		if (waits)
			sleep_until_told(bell, &time);
		left = end - now();
		waits = left > 0 && !(__atomic_load_n(bell, __ATOMIC_SEQ_CST) & RUNG);
	} while (waits || __atomic_load_n(bell, __ATOMIC_SEQ_CST) & SIGNALLED);
	return 0;
}

static PyObject *wait_bell(PyObject *object, PyObject *timeout)
{
	struct bell *self = (struct bell *)object;
	double seconds = PyFloat_AsDouble(timeout);
	int failed, *before;

	if (seconds == -1.0 && PyErr_Occurred())
		return NULL;
	if (!is_main()) {
		failed = wait_for(&self->told, seconds);
	} else {
		before = __atomic_exchange_n(&asleep_on, &self->told, __ATOMIC_SEQ_CST);
		failed = wait_for(&self->told, seconds);
		__atomic_store_n(&asleep_on, before, __ATOMIC_SEQ_CST);
	}
	if (failed)
		return NULL;
	Py_RETURN_NONE;
}

static PyMethodDef bell_methods[] = {
	{ "ring", ring, METH_NOARGS, "Wake who waits, or will." },
	{ "wait", wait_bell, METH_O, "Sleep until it is rung, or so many seconds; no signal is missed." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot bell_slots[] = {
	{ Py_tp_doc, "What one thread sleeps on, and another wakes it by." },
	{ Py_tp_methods, bell_methods },
	{ 0, NULL },
};

static PyType_Spec bell_spec = {
	.name = "mcast.interrupts._interrupts.Bell",
	.basicsize = sizeof(struct bell),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = bell_slots,
};

/* --- rows --- */

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

/* --- Enterable --- */

static PyObject *ended_by; /* "_ended_by" */

/* Call the method that ends the object; -1: it has raised. */
static int end(PyObject *self)
{
	PyObject *name = PyObject_GetAttr(self, ended_by);
	PyObject *found = name ? PyObject_CallMethodObjArgs(self, name, NULL) : NULL;

	Py_XDECREF(name);
	Py_XDECREF(found);
	return found ? 0 : -1;
}

/* No signal is taken before the object has ended: neither one that Python has noted, nor one that comes. */
static PyObject *leave_itself(PyObject *self, PyObject *const *error, Py_ssize_t count)
{
	PyObject *type = NULL, *value = NULL, *trace = NULL;

	if (enter()) {
		PyErr_Fetch(&type, &value, &trace);
		if (enter()) { /* another one: what hangs can be ended */
			follow(type, value, trace);
			return NULL;
		}
	}
	if (end(self)) {
		if (type)
			follow(type, value, trace);
	} else if (type) {
		PyErr_Restore(type, value, trace);
	} else {
		if (leave())
			return NULL;
		Py_RETURN_NONE;
	}
	leave_with_error();
	return NULL;
}

static PyObject *enter_itself(PyObject *self, PyObject *unused)
{
	PyObject *type, *value, *trace, *left;

	if (!may_miss_exit || !is_main() || !PyErr_CheckSignals())
		return Py_NewRef(self);
	PyErr_Fetch(&type, &value, &trace);
	left = leave_itself(self, NULL, 0);
	if (left)
		PyErr_Restore(type, value, trace);
	else
		follow(type, value, trace);
	Py_XDECREF(left);
	return NULL;
}

/* As a destructor: what cannot be raised in one, Ctrl-C, is taken afterwards. */
static PyObject *drop(PyObject *self, PyObject *unused)
{
	if (call_whole(end, self) && !PyErr_ExceptionMatches(PyExc_BufferError) &&
	    !PyErr_ExceptionMatches(PyExc_AttributeError))
		return NULL;
	PyErr_Clear();
	Py_RETURN_NONE;
}

static PyMethodDef enterable_methods[] = {
	{ "__enter__", enter_itself, METH_NOARGS, NULL },
	{ "__exit__", (PyCFunction)(void (*)(void))leave_itself, METH_FASTCALL, NULL },
	{ "_drop", drop, METH_NOARGS, "End it, as a destructor: its errors about what is in use are nobody's." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot enterable_slots[] = {
	{ Py_tp_doc, "`with` gives the object itself, and ends it by the method that `_ended_by` names." },
	{ Py_tp_methods, enterable_methods },
	{ 0, NULL },
};

static PyType_Spec enterable_spec = {
	.name = "mcast.interrupts._interrupts.Enterable",
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
	.slots = enterable_slots,
};

/* --- the module --- */

static PyMethodDef module_methods[] = {
	{ "take_interrupt", take_interrupt, METH_NOARGS,
	  "Take SIGINT now if one is held back: for a loop that does not wait, but may go on without end." },
	{ "is_held", is_held, METH_NOARGS, "Whether SIGINT is held back now." },
	{ "later", later, METH_VARARGS,
	  "Have it called once this thread holds no lock of that level or below; False: it holds none." },
	{ "is_within", is_within, METH_NOARGS, "Whether this thread holds a provider's lock." },
	{ "copy_rows", copy_rows, METH_VARARGS, "Copy rows of bytes that begin at equal distances." },
	{ "do_what_was_put_off", do_what_was_put_off, METH_NOARGS, "Call it now, for the thread waits with its locks." },
	{ NULL, NULL, 0, NULL },
};

static struct PyModuleDef module_def = {
	PyModuleDef_HEAD_INIT,
	.m_name = "_interrupts",
	.m_size = -1,
	.m_methods = module_methods,
};

/* The type, of which the module keeps the reference; NULL: an error. */
static PyObject *add_type(PyObject *module, PyType_Spec *spec, const char *name)
{
	PyObject *type = PyType_FromSpec(spec);

	if (type && PyModule_AddObjectRef(module, name, type))
		Py_CLEAR(type);
	Py_XDECREF(type);
	return type;
}

static int add_types(PyObject *module)
{
	PyObject *block = add_type(module, &block_spec, "uninterrupted");

	lock_type = add_type(module, &lock_spec, "Lock");
	bare = block ? PyObject_CallNoArgs(block) : NULL;
	return !lock_type || !bare || !add_type(module, &lifted_spec, "interruptible") ||
	       !add_type(module, &bell_spec, "Bell") || !add_type(module, &enterable_spec, "Enterable");
}

static int find_getsignal(void)
{
	PyObject *module = PyImport_ImportModule("_signal"); /* that of `signal` makes an enum member of what it gives */

	getsignal = module ? PyObject_GetAttrString(module, "getsignal") : NULL;
	sigint = Py_BuildValue("(i)", SIGINT);
	ended_by = PyUnicode_InternFromString("_ended_by");
	Py_XDECREF(module);
	return !getsignal || !sigint || !ended_by;
}

static int find_main_thread(void)
{
	PyObject *module = PyImport_ImportModule("threading");
	PyObject *thread = module ? PyObject_CallMethod(module, "main_thread", NULL) : NULL;
	PyObject *ident = thread ? PyObject_GetAttrString(thread, "ident") : NULL;

	main_thread = ident ? (pthread_t)PyLong_AsUnsignedLong(ident) : 0;
	Py_XDECREF(module);
	Py_XDECREF(thread);
	Py_XDECREF(ident);
	return !main_thread || PyErr_Occurred();
}

PyMODINIT_FUNC PyInit__interrupts(void)
{
	PyObject *module = PyModule_Create(&module_def);

	may_miss_exit = Py_Version >> 16 == 0x030e;
#ifdef Py_GIL_DISABLED
	if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED))
		Py_CLEAR(module);
#endif
	if (!module || find_getsignal() || find_main_thread() || add_types(module) ||
	    pthread_atfork(NULL, NULL, after_fork))
		Py_CLEAR(module);
	return module;
}

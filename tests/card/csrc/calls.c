/* Entry of every call: it may fail by the script, or stall. */
#include "inside.h"

#include <time.h>

enum { MAX_FAULTS = 64, STALL_SECONDS = 30 };

pthread_mutex_t card_lock = PTHREAD_MUTEX_INITIALIZER;

#define CALL_NAME(name, flags) { #name, flags },
static const struct {
	const char *name;
	int flags;
} calls[] = { CALLS(CALL_NAME) };
#undef CALL_NAME

const char *name_of(enum call call)
{
	return calls[call].name;
}

/* The `nth` call from now on, and `times` in all (-1: every one), fails with `error`, after `take` of its chain. */
struct fault {
	int nth, times, error, take;
};

static struct fault faults[CALL_COUNT][MAX_FAULTS];
static int fault_counts[CALL_COUNT];
static uint64_t call_counts[CALL_COUNT];

static int scripted(enum call call, int *take)
{
	int error = 0;

	call_counts[call]++;
	for (int i = 0; i < fault_counts[call]; i++) {
		struct fault *one = &faults[call][i];

		if (one->nth > 1) {
			one->nth--;
		} else if (one->times && !error) {
			error = one->error;
			if (take)
				*take = one->take;
			one->times -= one->times > 0;
		}
	}
	return error;
}

int fault(enum call call, const struct object *object, int *take)
{
	int error = fault_counts[call] ? scripted(call, take) : (call_counts[call]++, 0);

	if (!error && object && object->device && object->device->disassociated && calls[call].flags & COMMAND)
		error = EIO;
	return error;
}

int64_t said(enum call call, int64_t truth)
{
	int number = fault(call, NULL, NULL);

	if (number == LIE_ZERO)
		return 0;
	return number ? number : truth;
}

static int number_of(const char *name)
{
	for (int call = 0; call < CALL_COUNT; call++)
		if (!strcmp(calls[call].name, name))
			return call;
	return -1;
}

/* -1: there is no such call, or too much of a script. */
int card_fail(const char *name, int nth, int times, int error, int take)
{
	int call = number_of(name), ret = -1;

	if (call < 0)
		return -1;
	pthread_mutex_lock(&card_lock);
	if (fault_counts[call] < MAX_FAULTS) {
		faults[call][fault_counts[call]++] = (struct fault){ nth, times, error, take };
		ret = 0;
	}
	pthread_mutex_unlock(&card_lock);
	return ret;
}

void card_fail_no_more(void)
{
	pthread_mutex_lock(&card_lock);
	memset(fault_counts, 0, sizeof(fault_counts));
	pthread_mutex_unlock(&card_lock);
}

/* A call that stands still until the test lets it go on, so that another thread can do something meanwhile. */
static struct {
	int nth, inside, goes;
} stalls[CALL_COUNT];

static pthread_cond_t go_on = PTHREAD_COND_INITIALIZER;

int card_stall(const char *name, int nth)
{
	int call = number_of(name);

	if (call < 0)
		return -1;
	pthread_mutex_lock(&card_lock);
	stalls[call].nth = nth;
	pthread_mutex_unlock(&card_lock);
	return 0;
}

/* Return the number of calls that are stalled. */
int card_stalled(const char *name)
{
	int call = number_of(name), count;

	if (call < 0)
		return -1;
	pthread_mutex_lock(&card_lock);
	count = stalls[call].inside;
	pthread_mutex_unlock(&card_lock);
	return count;
}

int card_go_on(const char *name)
{
	int call = number_of(name);

	if (call < 0)
		return -1;
	pthread_mutex_lock(&card_lock);
	stalls[call].goes++;
	pthread_cond_broadcast(&go_on);
	pthread_mutex_unlock(&card_lock);
	return 0;
}

static void stand_still(enum call call)
{
	struct timespec until;
	int goes = stalls[call].goes, late = 0;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += STALL_SECONDS;
	stalls[call].inside++;
	while (goes == stalls[call].goes && !late)
		late = pthread_cond_timedwait(&go_on, &card_lock, &until);
	stalls[call].inside--;
	if (late)
		report("%s stood still for %d seconds, and nobody let it go on", calls[call].name, STALL_SECONDS);
}

/* Work that is held at a stage, to be released as a call begins. */
static struct {
	int nth, stage;
	uint32_t qp_num;
} releases[CALL_COUNT];

/* -1: there is no such call. */
int card_release_at(const char *name, int nth, uint32_t qp_num, int stage)
{
	int call = number_of(name);

	if (call < 0)
		return -1;
	pthread_mutex_lock(&card_lock);
	releases[call].nth = nth;
	releases[call].stage = stage;
	releases[call].qp_num = qp_num;
	pthread_mutex_unlock(&card_lock);
	return 0;
}

static void release_now(enum call call)
{
	struct qp *qp = find_qp(releases[call].qp_num);

	if (qp)
		release_work(qp, (enum stage)releases[call].stage, -1);
}

/* Return how often a call was made; -1: there is no such call. */
int64_t card_count(const char *name)
{
	int call = number_of(name);
	int64_t count;

	if (call < 0)
		return -1;
	pthread_mutex_lock(&card_lock);
	count = (int64_t)call_counts[call];
	pthread_mutex_unlock(&card_lock);
	return count;
}

const char *card_call_name(int call)
{
	return call >= 0 && call < CALL_COUNT ? calls[call].name : NULL;
}

int hold(enum call call, enum kind kind, const void *target)
{
	pthread_mutex_lock(&card_lock);
	if (stalls[call].nth && !--stalls[call].nth)
		stand_still(call);
	if (releases[call].nth && !--releases[call].nth)
		release_now(call);
	return kind == KIND_COUNT || is_alive(call, kind, target) ? 0 : EINVAL;
}

int enter(enum call call, enum kind kind, const void *target)
{
	int error = hold(call, kind, target);
	struct object *object = kind == KIND_COUNT || error ? NULL : object_of(kind, target);

	if (!error)
		error = fault(call, object, NULL);
	if (object && calls[call].flags & DESTROY) {
		object->refused |= !!error;
		if (!error && object->uses)
			error = EBUSY;
	}
	return error;
}

void leave(void)
{
	pthread_mutex_unlock(&card_lock);
}

/* Return from a call that makes an object. */
void *made(void *object, int error)
{
	leave();
	if (error)
		errno = error;
	return error ? NULL : object;
}

/* Return from a call that returns its errno. */
int done(int error)
{
	leave();
	if (error >= 0)
		return error;
	errno = -error;
	return -1;
}

/* librdmacm's calls return -1 and set errno. */
int result(int error)
{
	leave();
	if (error)
		errno = error;
	return error ? -1 : 0;
}

void forget_script(void)
{
	memset(fault_counts, 0, sizeof(fault_counts));
	memset(call_counts, 0, sizeof(call_counts));
	for (int call = 0; call < CALL_COUNT; call++)
		stalls[call].nth = releases[call].nth = 0;
}

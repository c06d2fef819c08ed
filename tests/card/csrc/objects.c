/* Objects that live, objects that are gone, and reports of wrong uses of either. */
#include "inside.h"

#include <stdarg.h>
#include <stdio.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

enum { MAX_DEAD = 256, REPORT_BYTES = 16384 };

#define KIND_NAME(name, text) text,
static const char *const kind_names[] = { KINDS(KIND_NAME) };
#undef KIND_NAME

/* --- what was done wrong --- */

static char reports[REPORT_BYTES];
static size_t report_length;

void report(const char *format, ...)
{
	size_t room = sizeof(reports) - report_length;
	va_list arguments;
	int length;

	va_start(arguments, format);
	length = vsnprintf(reports + report_length, room, format, arguments);
	va_end(arguments);
	if (length < 0 || (size_t)length + 2 > room)
		return;
	report_length += (size_t)length;
	reports[report_length++] = '\n';
	reports[report_length] = 0;
}

/* Copies the lines; how many bytes there are. */
int card_reports(char *out, int size)
{
	int length;

	pthread_mutex_lock(&card_lock);
	length = (int)report_length;
	snprintf(out, (size_t)size, "%s", reports);
	pthread_mutex_unlock(&card_lock);
	return length;
}

/* --- objects --- */

struct object *first_object;
static struct object *dead[KIND_COUNT][MAX_DEAD];
static unsigned deaths[KIND_COUNT];
static unsigned last_serial;

struct object *object_of(enum kind kind, const void *object)
{
	const void *start = object;

	if (kind == KIND_CONTEXT)
		start = container_of((struct ibv_context *)(uintptr_t)object, struct context, verbs.context);
	return (struct object *)(uintptr_t)start - 1;
}

struct device *device_of(enum kind kind, const void *object)
{
	return object_of(kind, object)->device;
}

static void *public_part(struct object *object)
{
	void *start = object + 1;

	return object->kind == KIND_CONTEXT ? (void *)&((struct context *)start)->verbs.context : start;
}

void *make(enum kind kind, size_t size, struct device *device)
{
	struct object *object = calloc(1, sizeof(*object) + size);

	if (!object)
		abort();
	*object = (struct object){ .magic = ALIVE, .kind = kind, .size = size, .device = device,
				   .serial = ++last_serial, .next = first_object, .back = &first_object };
	if (first_object)
		first_object->back = &object->next;
	first_object = object;
	return object + 1;
}

void end(enum kind kind, void *target)
{
	struct object *object = object_of(kind, target);
	struct object **place = &dead[kind][deaths[kind]++ % MAX_DEAD];

	*object->back = object->next;
	if (object->next)
		object->next->back = object->back;
	object->magic = DEAD;
	ASAN_POISON_MEMORY_REGION(object + 1, object->size);
	if (*place) {
		ASAN_UNPOISON_MEMORY_REGION(*place + 1, (*place)->size);
		free(*place);
	}
	*place = object;
}

int is_alive(enum call call, enum kind kind, const void *target)
{
	const struct object *object = target ? object_of(kind, target) : NULL;

	if (object && object->magic == ALIVE && object->kind == kind)
		return 1;
	if (object && object->magic == DEAD && object->kind == kind)
		report("%s: %s %u was destroyed before", name_of(call), kind_names[kind], object->serial);
	else
		report("%s: what was given is no %s", name_of(call), kind_names[kind]);
	return 0;
}

void settle_events(enum call call, enum kind kind, const void *target)
{
	struct object *object = object_of(kind, target);

	if (object->unacked)
		report("%s: %s %u has %d events that were not acked, and would wait for ever", name_of(call),
		       kind_names[kind], object->serial, object->unacked);
}

static int is_kept(const struct context *context)
{
	return context->is_cm && !context->is_dead;
}

/* A line for each object that lives: its kind, its number, whether a destroy of it failed, how many use it. */
int card_leftovers(char *out, int size)
{
	int length = 0;

	pthread_mutex_lock(&card_lock);
	for (struct object *object = first_object; object; object = object->next) {
		int room = length < size ? size - length : 0;

		if (object->kind == KIND_CONTEXT && is_kept((struct context *)(object + 1)))
			continue;
		length += snprintf(room ? out + length : NULL, (size_t)room, "%s|%u|%d|%d\n",
				   kind_names[object->kind], object->serial, object->refused, object->uses);
		for (struct membership *one = object->kind == KIND_ID ? ((struct id *)(object + 1))->memberships : NULL;
		     one; one = one->next) {
			room = length < size ? size - length : 0;
			length += snprintf(room ? out + length : NULL, (size_t)room, "membership|%u|%d|0\n",
					   object->serial, one->is_left);
		}
	}
	pthread_mutex_unlock(&card_lock);
	return length;
}


void forget_objects(void)
{
	while (first_object) {
		if (first_object->kind == KIND_CONTEXT)
			close_queue(&((struct context *)(first_object + 1))->async);
		end(first_object->kind, public_part(first_object));
	}
	report_length = 0;
	reports[0] = 0;
}

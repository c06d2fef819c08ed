/* Loads the two libraries, all or nothing. The caller serialises mcast_load; what it has written is only read then. */
#include "dynload.h"

#include <dlfcn.h>
#include <stdio.h>

struct mcast_symbols mcast_sym;

struct wanted {
	const char *name;
	const char *version;
	size_t offset;
	int required;
};

#define REQUIRED(name, version) { #name, version, offsetof(struct mcast_symbols, name), 1 },
#define OPTIONAL(name, version) { #name, version, offsetof(struct mcast_symbols, name), 0 },
static const struct wanted rdmacm_wanted[] = { MCAST_RDMACM_SYMBOLS(REQUIRED, OPTIONAL) };
static const struct wanted ibverbs_wanted[] = { MCAST_IBVERBS_SYMBOLS(REQUIRED, OPTIONAL) };
#undef REQUIRED
#undef OPTIONAL

static int find_all(void *library, const char *path, const struct wanted *wanted, size_t count,
		    struct mcast_symbols *found, char *reason, size_t size)
{
	for (size_t i = 0; i < count; i++) {
		void *symbol = dlvsym(library, wanted[i].name, wanted[i].version);

		if (!symbol && wanted[i].required) {
			snprintf(reason, size, "%s has no %s@%s", path, wanted[i].name, wanted[i].version);
			return -ENOSYS;
		}
		memcpy((char *)found + wanted[i].offset, &symbol, sizeof(symbol));
	}
	return 0;
}

static void *open_library(const char *path, char *reason, size_t size)
{
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);

	if (!library)
		snprintf(reason, size, "%s", dlerror());
	return library;
}

int mcast_load(const char *rdmacm, const char *ibverbs, char *reason, size_t size)
{
	struct mcast_symbols found = { 0 };
	void *verbs_library, *cm_library;
	int ret;

	/* verbs first: librdmacm then binds to this very copy */
	verbs_library = open_library(ibverbs, reason, size);
	if (!verbs_library)
		return -ENOENT;
	cm_library = open_library(rdmacm, reason, size);
	if (!cm_library) {
		dlclose(verbs_library);
		return -ENOENT;
	}

	ret = find_all(verbs_library, ibverbs, ibverbs_wanted, sizeof(ibverbs_wanted) / sizeof(*ibverbs_wanted),
		       &found, reason, size);
	if (!ret)
		ret = find_all(cm_library, rdmacm, rdmacm_wanted,
			       sizeof(rdmacm_wanted) / sizeof(*rdmacm_wanted), &found, reason, size);
	if (ret) {
		dlclose(cm_library);
		dlclose(verbs_library);
		return ret;
	}
	mcast_sym = found;
	return 0;
}

const char *mcast_verbs_library(void)
{
	Dl_info info;
	void *symbol;

	memcpy(&symbol, &mcast_sym.ibv_open_device, sizeof(symbol));
	return dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : "";
}

int mcast_has_join_ex(void)
{
	return mcast_sym.rdma_join_multicast_ex != NULL;
}

int mcast_fork_init(void)
{
	return mcast_returned(mcast_sym.ibv_fork_init());
}

/* A stand-in for libnvidia-ml.so.1 that describes GPUs which are not there.
 *
 * Every answer comes from the environment (overlay/rehearsal/driver.py sets it), so one build serves every rehearsal:
 *   OVERLAY_REHEARSAL_DEVICES, _CAPABILITY ("12.1"), _NAME, _MEMORY (bytes; 0 = "not supported", as on GB10).
 * What is not defined here is what vLLM and PyTorch never ask; pynvml reports such a name as "function not found".
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NVML_SUCCESS = 0, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_INSUFFICIENT_SIZE = 7 };
enum { DRIVER_CUDA_VERSION = 13000 };

static const char *setting(const char *name, const char *fallback) {
    const char *value = getenv(name);
    return value && *value ? value : fallback;
}

static unsigned device_count(void) { return (unsigned)strtoul(setting("OVERLAY_REHEARSAL_DEVICES", "0"), NULL, 10); }

/* A handle is the device's index plus one: never NULL, nothing to allocate or free. */
static void *handle_of(unsigned index) { return (void *)((size_t)index + 1); }
static unsigned index_of(void *handle) { return (unsigned)((size_t)handle - 1); }

static int copy_text(char *out, unsigned size, const char *text) {
    return (unsigned)snprintf(out, size, "%s", text) < size ? NVML_SUCCESS : NVML_INSUFFICIENT_SIZE;
}

int nvmlInit(void) { return NVML_SUCCESS; }
int nvmlInit_v2(void) { return NVML_SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return NVML_SUCCESS; }
int nvmlShutdown(void) { return NVML_SUCCESS; }

const char *nvmlErrorString(int status) {
    switch (status) {
    case NVML_SUCCESS: return "Success";
    case NVML_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_NOT_SUPPORTED: return "Not Supported";
    case NVML_NOT_FOUND: return "Not Found";
    case NVML_INSUFFICIENT_SIZE: return "Insufficient Size";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) { return copy_text(out, size, "580.00"); }
int nvmlSystemGetNVMLVersion(char *out, unsigned size) { return copy_text(out, size, "13.580.00"); }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = DRIVER_CUDA_VERSION; return NVML_SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = device_count(); return NVML_SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index >= device_count()) return NVML_INVALID_ARGUMENT;
    *handle = handle_of(index);
    return NVML_SUCCESS;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index) { *index = index_of(handle); return NVML_SUCCESS; }

int nvmlDeviceGetUUID(void *handle, char *out, unsigned size) {
    char uuid[64];
    snprintf(uuid, sizeof uuid, "GPU-00000000-0000-0000-0000-%012x", index_of(handle));
    return copy_text(out, size, uuid);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    char known[64];
    for (unsigned index = 0; index < device_count(); index++) {
        nvmlDeviceGetUUID(handle_of(index), known, sizeof known);
        if (strcmp(known, uuid) == 0) { *handle = handle_of(index); return NVML_SUCCESS; }
    }
    return NVML_NOT_FOUND;
}

int nvmlDeviceGetName(void *handle, char *out, unsigned size) {
    (void)handle;
    return copy_text(out, size, setting("OVERLAY_REHEARSAL_NAME", "rehearsed GPU"));
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    (void)handle;
    return sscanf(setting("OVERLAY_REHEARSAL_CAPABILITY", ""), "%d.%d", major, minor) == 2 ? NVML_SUCCESS
                                                                                            : NVML_NOT_SUPPORTED;
}

static int memory_bytes(unsigned long long *total) {
    *total = strtoull(setting("OVERLAY_REHEARSAL_MEMORY", "0"), NULL, 10);
    return *total ? NVML_SUCCESS : NVML_NOT_SUPPORTED;
}

int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *total_free_used) {
    (void)handle;
    unsigned long long total;
    if (memory_bytes(&total) != NVML_SUCCESS) return NVML_NOT_SUPPORTED;
    total_free_used[0] = total_free_used[1] = total;
    total_free_used[2] = 0;
    return NVML_SUCCESS;
}

struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };

int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory) {
    (void)handle;
    if (memory_bytes(&memory->total) != NVML_SUCCESS) return NVML_NOT_SUPPORTED;
    memory->free = memory->total;
    memory->reserved = memory->used = 0;
    return NVML_SUCCESS;
}

struct pci_info { char bus_id_legacy[16]; unsigned domain, bus, device, device_id, subsystem_id; char bus_id[32]; };

int nvmlDeviceGetPciInfo_v3(void *handle, struct pci_info *info) {
    memset(info, 0, sizeof *info);
    info->bus = index_of(handle) + 1;
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "0000:%02X:00.0", info->bus & 0xffu);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus & 0xffu);
    return NVML_SUCCESS;
}

/* No NVLink between rehearsed devices: neither small-SM Blackwell board has it (NVML_P2P_STATUS_NOT_SUPPORTED = 5). */
int nvmlDeviceGetP2PStatus(void *from, void *to, int capability, int *status) {
    (void)from, (void)to, (void)capability;
    *status = 5;
    return NVML_SUCCESS;
}

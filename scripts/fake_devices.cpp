// Devices without memory that plan like CUDA's: same alignment, same padding, same room for a flash attention's f16 copy,
// asynchronous with events (so that llama.cpp pipelines). They compute nothing; under no_alloc nobody asks them to.
// Built and loaded by scripts/measure_dry_runs. Counts and sizes come from the environment:
// FAKE_DEVICES (8), FAKE_BYTES (80 GiB), FAKE_PLAIN (set: no events, no f16 copy).

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

struct Fake {
    std::string name;
    ggml_backend_device device;
    ggml_backend_buffer_type buffers;
};

long long from_env(const char * name, long long otherwise) {
    const char * value = std::getenv(name);
    return value ? std::atoll(value) : otherwise;
}

bool plain() { return std::getenv("FAKE_PLAIN") != nullptr; }

std::vector<Fake *> & fakes() {
    static std::vector<Fake *> all;
    return all;
}

Fake * of(ggml_backend_dev_t device) { return (Fake *) device->context; }

// ── buffers ─────────────────────────────────────────────────────────────────────────────────────────────────────────

void buffer_free(ggml_backend_buffer_t) {}
void * buffer_base(ggml_backend_buffer_t) { return nullptr; }
void buffer_clear(ggml_backend_buffer_t, uint8_t) {}
void buffer_set(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {}
void buffer_get(ggml_backend_buffer_t, const ggml_tensor *, void *, size_t, size_t) {}

const char * type_name(ggml_backend_buffer_type_t type) { return ((Fake *) type->context)->name.c_str(); }
size_t type_alignment(ggml_backend_buffer_type_t) { return 128; }

ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_i buffer = {};
    buffer.free_buffer = buffer_free;
    buffer.get_base = buffer_base;
    buffer.clear = buffer_clear;
    buffer.set_tensor = buffer_set;
    buffer.get_tensor = buffer_get;
    return ggml_backend_buffer_init(type, buffer, nullptr, size);
}

size_t type_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    size_t size = ggml_nbytes(tensor);
    if (tensor->op == GGML_OP_FLASH_ATTN_EXT && !plain()) {  // ggml_cuda_flash_attn_ext_get_alloc_size
        const ggml_tensor * k = tensor->src[1];
        const ggml_tensor * v = tensor->src[2];
        if (k->type != GGML_TYPE_F16) {
            size = GGML_PAD(size, 128) + ggml_nelements(k) * 2;
        }
        const bool is_view = v->view_src && (v->view_src == k || (v->view_src == k->view_src && v->view_offs == k->view_offs));
        if (v->type != GGML_TYPE_F16 && !is_view) {
            size = GGML_PAD(size, 128) + ggml_nelements(v) * 2;
        }
    }
    if (ggml_is_quantized(tensor->type) && tensor->ne[0] % 512 != 0) {  // MATRIX_ROW_PADDING
        size += ggml_row_size(tensor->type, 512 - tensor->ne[0] % 512);
    }
    return size;
}

ggml_backend_buffer_type_t host_buffers() {
    static ggml_backend_buffer_type * host = [] {
        auto * type = new ggml_backend_buffer_type(*ggml_backend_cpu_buffer_type());
        type->iface.get_name = [](ggml_backend_buffer_type_t) { return "FAKE_Host"; };
        return type;
    }();
    return host;
}

// ── backends ────────────────────────────────────────────────────────────────────────────────────────────────────────

const char * backend_name(ggml_backend_t backend) { return of(backend->device)->name.c_str(); }
void backend_free(ggml_backend_t backend) { delete backend; }
ggml_status backend_compute(ggml_backend_t, ggml_cgraph *) { return GGML_STATUS_FAILED; }
void backend_synchronize(ggml_backend_t) {}

ggml_backend_t device_init(ggml_backend_dev_t device, const char *) {
    static ggml_guid guid = { 0x66, 0x61, 0x6b, 0x65 };
    auto * backend = new ggml_backend();
    backend->guid = &guid;
    backend->iface.get_name = backend_name;
    backend->iface.free = backend_free;
    backend->iface.graph_compute = backend_compute;
    backend->iface.synchronize = backend_synchronize;
    backend->device = device;
    return backend;
}

// ── devices ─────────────────────────────────────────────────────────────────────────────────────────────────────────

const char * device_name(ggml_backend_dev_t device) { return of(device)->name.c_str(); }
const char * device_description(ggml_backend_dev_t) { return "a device without memory"; }
enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void device_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free = *total = (size_t) from_env("FAKE_BYTES", 80LL << 30);
}

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    std::memset(props, 0, sizeof(*props));
    props->name = device_name(device);
    props->description = device_description(device);
    props->type = device_type(device);
    device_memory(device, &props->memory_free, &props->memory_total);
    props->caps.async = props->caps.events = !plain();
    props->caps.host_buffer = true;
}

ggml_backend_buffer_type_t device_buffers(ggml_backend_dev_t device) { return &of(device)->buffers; }
ggml_backend_buffer_type_t device_host_buffers(ggml_backend_dev_t) { return host_buffers(); }
bool device_supports_op(ggml_backend_dev_t, const ggml_tensor *) { return true; }
bool device_supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) { return type->device == device; }

bool device_offload_op(ggml_backend_dev_t, const ggml_tensor * op) {  // CUDA's get_op_batch_size >= 32
    switch (op->op) {
        case GGML_OP_GET_ROWS: return false;
        case GGML_OP_MUL_MAT: return op->ne[1] >= 32;
        case GGML_OP_MUL_MAT_ID:
        case GGML_OP_ROPE: return op->ne[2] >= 32;
        default: return ggml_nrows(op) >= 32;
    }
}

ggml_backend_event_t event_new(ggml_backend_dev_t device) { return new ggml_backend_event{ device, nullptr }; }
void event_free(ggml_backend_dev_t, ggml_backend_event_t event) { delete event; }
void event_synchronize(ggml_backend_dev_t, ggml_backend_event_t) {}

// ── registry ────────────────────────────────────────────────────────────────────────────────────────────────────────

const char * reg_name(ggml_backend_reg_t) { return "FAKE"; }
size_t reg_count(ggml_backend_reg_t) { return fakes().size(); }
ggml_backend_dev_t reg_device(ggml_backend_reg_t, size_t index) { return &fakes()[index]->device; }

ggml_backend_reg_t fake_reg() {
    static ggml_backend_reg reg = {};
    if (reg.api_version == 0) {
        reg.api_version = GGML_BACKEND_API_VERSION;
        reg.iface.get_name = reg_name;
        reg.iface.get_device_count = reg_count;
        reg.iface.get_device = reg_device;
        for (int i = 0; i < from_env("FAKE_DEVICES", 8); i++) {
            auto * fake = new Fake();
            fake->name = "FAKE" + std::to_string(i);
            fake->device = { {}, &reg, fake };
            auto & device = fake->device.iface;
            device.get_name = device_name;
            device.get_description = device_description;
            device.get_memory = device_memory;
            device.get_type = device_type;
            device.get_props = device_props;
            device.init_backend = device_init;
            device.get_buffer_type = device_buffers;
            device.get_host_buffer_type = device_host_buffers;
            device.supports_op = device_supports_op;
            device.supports_buft = device_supports_buft;
            device.offload_op = device_offload_op;
            device.event_new = event_new;
            device.event_free = event_free;
            device.event_synchronize = event_synchronize;
            fake->buffers = { { type_name, type_alloc, type_alignment, nullptr, type_alloc_size, nullptr }, &fake->device, fake };
            fakes().push_back(fake);
        }
    }
    return &reg;
}

}  // namespace

GGML_BACKEND_DL_IMPL(fake_reg)

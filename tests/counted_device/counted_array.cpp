// SPDX-License-Identifier: Apache-2.0
// An array class of nnabla's that stands in for a GPU's: CPU memory that everything else takes for a device's. nnabla copies
// it to the host and back where it would with a GPU, and each copy is counted, as is each array that is made.
//
// nnabla's wheels hold no headers. What is declared here is in include/nbla of nnabla 1.39: context.hpp, array.hpp,
// dtypes.hpp (NumPy's numbers of types) and array_registry.hpp.

#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace nbla {

enum class dtypes : int {};
class Array;
class AllocatorMemory;

struct Context {
    std::vector<std::string> backend;
    std::string array_class;
    std::string device_id;
};

struct ArrayCreator {
    using Create = std::function<Array*(long, dtypes, const Context&, std::shared_ptr<AllocatorMemory>, long)>;
    static Array* create(long, dtypes, const Context&, std::shared_ptr<AllocatorMemory>, long);
    static void add_creator(const std::string&, Create, std::function<Context(const Context&)>);
};

struct ArraySynchronizer {
    using Copy = std::function<void(Array*, Array*, int)>;
    static void add_synchronizer(const std::string&, const std::string&, Copy);
};

struct BackendUtils {
    static void register_array_class(Context, const std::string&);
};

struct ArrayGroup {
    static void add_group(const std::string&, const std::string&);
};

void synchronizer_default(Array*, Array*, int);

}  // namespace nbla

namespace {

const char* const DEVICE = "CountedArray";
const char* const HOST_CLASSES[] = {"CpuCachedArray", "CpuArray"};

std::atomic<long> to_host, to_device;
long left = -1;  // arrays that there is memory for; negative: for any number
std::vector<long> made;  // pairs of dtype and size

nbla::Array* make(long size, nbla::dtypes dtype, const nbla::Context& context,
                  std::shared_ptr<nbla::AllocatorMemory> memory, long offset) {
    if (left == 0) {
        throw std::runtime_error("memory error in alloc\ncounted_array.cpp\nFailed to allocate again.");
    }
    left -= left > 0;
    made.push_back(static_cast<long>(dtype));
    made.push_back(size);
    nbla::Context on_host = context;
    on_host.array_class = HOST_CLASSES[0];
    return nbla::ArrayCreator::create(size, dtype, on_host, memory, offset);
}

nbla::ArraySynchronizer::Copy counting(std::atomic<long>& counter) {
    return [&counter](nbla::Array* source, nbla::Array* target, int flags) {
        ++counter;
        nbla::synchronizer_default(source, target, flags);
    };
}

}  // namespace

extern "C" {

void install() {
    nbla::ArrayCreator::add_creator(DEVICE, make, [](const nbla::Context& context) { return context; });
    nbla::ArrayGroup::add_group(DEVICE, DEVICE);
    nbla::BackendUtils::register_array_class({{"cpu:float"}, HOST_CLASSES[0], "0"}, DEVICE);
    for (const char* host : HOST_CLASSES) {
        nbla::ArraySynchronizer::add_synchronizer(DEVICE, host, counting(to_host));
        nbla::ArraySynchronizer::add_synchronizer(host, DEVICE, counting(to_device));
    }
}

void leave_room_for(long arrays) { left = arrays; }
long copies_to_host() { return to_host; }
long copies_to_device() { return to_device; }
long arrays_made() { return static_cast<long>(made.size()) / 2; }
const long* array_made(long index) { return made.data() + 2 * index; }
}

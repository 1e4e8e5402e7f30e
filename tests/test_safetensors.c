/* test_safetensors.c - round trips, damaged and hostile files, failing calls, and a save that is killed. */
#include "core/safetensors.h"
#include "faulty_io.h"
#include "read_file.h"
#include "kernels/dtype.h"

#include <signal.h>
#include <sys/wait.h>

/* The index of a tensor; -1: not there. */
static int find(const te_safetensors *st, const char *name)
{
    for (int i = 0; i < te_safetensors_count(st); i++)
        if (strcmp(te_safetensors_get(st, i)->name, name) == 0) return i;
    return -1;
}

/* --- a small file with everything in it ------------------------------------------------------------------------- */

static const float   weights[6] = {1, -2, 3.5f, 0, 1e30f, -1e-30f};
static const uint8_t flags[3] = {1, 0, 1};
static const int64_t step = -7;
static const uint16_t halves[4] = {0x3f80, 0x4000, 0, 0x7fc0};
static const uint8_t eights[5] = {1, 2, 3, 4, 255};

static te_status read_halves(void *user, int64_t offset, void *to, size_t size, te_io_error *error)
{
    (void)error;
    ++*(int *)user;
    memcpy(to, (const char *)halves + offset, size);
    return TE_OK;
}

static int read_calls;
static const te_safetensors_item sample_items[] = {
    {.name = "flags", .dtype = TE_BOOL, .ndim = 1, .shape = {3}, .data = flags},
    {.name = "weights", .dtype = TE_F32, .ndim = 2, .shape = {2, 3}, .data = weights},
    {.name = "step", .dtype = TE_I64, .ndim = 0, .data = &step},
    {.name = "empty", .dtype = TE_F16, .ndim = 3, .shape = {4, 0, 2}},
    {.name = "halves", .dtype = TE_BF16, .ndim = 1, .shape = {4}, .read = read_halves, .user = &read_calls},
    {.name = "quote \" back\\slash \x01 \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", .dtype = TE_F8E4M3, .ndim = 1,
     .shape = {5}, .data = eights},
    {.name = "", .dtype = TE_U8, .ndim = 1, .shape = {5}, .data = eights},
};
static const te_safetensors_pair sample_metadata[] = {
    {"format", "tetrain"}, {"text", "line\n\"quoted\" \xc3\xbc"}, {"", ""}};
static const te_safetensors_contents sample = {sample_items, 7, sample_metadata, 3};

/* Reads everything that opens; the count of tensors, or -1 with the error. */
static int read_all(const te_io *io, const te_mem *mem, const char *path, te_io_error *error)
{
    te_safetensors *st;
    if (te_safetensors_open(&st, io, mem, path, error) != TE_OK) return -1;
    int count = te_safetensors_count(st);
    for (int i = 0; i < te_safetensors_count(st); i++) {
        size_t size = (size_t)te_safetensors_get(st, i)->size;
        void *data = te_mem_alloc(mem, size);
        if (!data) {
            te_io_fail(error, TE_ERROR_MEMORY, path, "test buffer");
            count = -1;
        } else if (te_safetensors_read(st, i, data, size, error) != TE_OK) {
            count = -1;
        }
        te_mem_free(mem, data, size);
    }
    te_safetensors_close(st);
    return count;
}

static void test_round_trip(void)
{
    faulty_io f;
    faulty_mem m;
    te_io_error error;
    faulty_io_init(&f);
    faulty_mem_init(&m);
    for (int stutter = 0; stutter < 2; stutter++) {
        te_safetensors *st;
        f.stutter = stutter;
        read_calls = 0;
        CHECK(te_safetensors_write(&f.io, &m.mem, "sample", &sample, &error) == TE_OK && read_calls == 1);
        CHECK_MSG(te_safetensors_open(&st, &f.io, &m.mem, "sample", &error) == TE_OK, "%s", error.message);
        CHECK(te_safetensors_count(st) == 7 && te_safetensors_metadata_count(st) == 3);
        for (int i = 0; i < 7; i++) {
            const te_safetensors_item *item = &sample_items[i];
            int at = find(st, item->name);
            CHECK(at >= 0);
            if (at < 0) continue;
            const te_safetensors_entry *e = te_safetensors_get(st, at);
            CHECK(!strcmp(e->name, item->name) && e->dtype == item->dtype && e->ndim == item->ndim);
            CHECK(!memcmp(e->shape, item->shape, sizeof e->shape));
            CHECK(e->offset % (int64_t)te_dtype_size(e->dtype) == 0 && e->size == e->bytes);
            CHECK(!strcmp(e->stored, te_safetensors_dtype_name(item->dtype)));
            char data[64];
            CHECK(te_safetensors_read(st, at, data, (size_t)e->bytes, &error) == TE_OK);
            if (e->bytes) CHECK(!memcmp(data, item->data ? item->data : halves, (size_t)e->bytes));
            CHECK(te_safetensors_read(st, at, data, (size_t)e->bytes + 1, &error) == TE_ERROR_ARGUMENT);
        }
        CHECK(te_safetensors_get(st, 0)->offset % 64 == 0 && te_safetensors_get(st, 0)->dtype == TE_I64);
        for (int i = 0; i < 3; i++) {
            const te_safetensors_pair *pair = te_safetensors_metadata(st, i);
            CHECK(!strcmp(pair->key, sample_metadata[i].key) && !strcmp(pair->value, sample_metadata[i].value));
        }
        CHECK(find(st, "absent") == -1);
        te_safetensors_close(st);
    }
    te_safetensors_contents nothing = {0};
    CHECK(te_safetensors_write(&f.io, &m.mem, "nothing", &nothing, &error) == TE_OK);
    CHECK(read_all(&f.io, &m.mem, "nothing", &error) == 0);
    CHECK(atomic_load(&f.open_files) == 0 && m.bytes == 0);
}

/* More than one piece through the callback, and one tensor in memory of the same contents. */
static te_status read_ramp(void *user, int64_t offset, void *to, size_t size, te_io_error *error)
{
    if (*(int64_t *)user >= 0 && offset >= *(int64_t *)user)
        return te_io_fail(error, TE_ERROR_DEVICE, NULL, "copy failed");
    for (size_t i = 0; i < size; i++) ((uint8_t *)to)[i] = (uint8_t)((offset + (int64_t)i) * 31 >> 3);
    return TE_OK;
}

static void test_pieces(void)
{
    enum { N = (5 << 20) + 13 };
    faulty_mem m;
    te_io_error error;
    int64_t fail_from = -1;
    faulty_mem_init(&m);
    te_safetensors_item item = {.name = "ramp", .dtype = TE_U8, .ndim = 1, .shape = {N}, .read = read_ramp,
                                .user = &fail_from};
    te_safetensors_contents contents = {.items = &item, .n_items = 1};
    CHECK(te_safetensors_write(&te_io_posix, &m.mem, "ramp", &contents, &error) == TE_OK);
    te_safetensors *st;
    CHECK(te_safetensors_open(&st, &te_io_posix, &m.mem, "ramp", &error) == TE_OK);
    uint8_t *data = malloc(N), *wanted = malloc(N);
    CHECK(te_safetensors_read(st, 0, data, N, &error) == TE_OK);
    read_ramp(&fail_from, 0, wanted, N, &error);
    CHECK(memcmp(data, wanted, N) == 0);
    te_safetensors_close(st);
    fail_from = 3 << 20;
    CHECK(te_safetensors_write(&te_io_posix, &m.mem, "ramp", &contents, &error) == TE_ERROR_DEVICE);
    CHECK(strstr(error.message, "copy failed") && test_folder_count(".", ".tmp", false) == 0);
    CHECK(read_all(&te_io_posix, &m.mem, "ramp", &error) == 1 && m.bytes == 0);
    free(data);
    free(wanted);
}

/* --- damage ----------------------------------------------------------------------------------------------------- */

static void test_cuts(void)
{
    faulty_mem m;
    te_io_error error;
    char *data;
    size_t size;
    faulty_mem_init(&m);
    CHECK(read_file(&te_io_posix, &te_mem_libc, "sample", &data, &size, &error) == TE_OK);
    for (size_t n = 0; n < size; n++) {
        char offset[40];
        test_file_write("cut", data, n);
        CHECK_MSG(read_all(&te_io_posix, &m.mem, "cut", &error) == -1, "cut at %zu of %zu was accepted", n, size);
        snprintf(offset, sizeof offset, "cut: offset %zu: ", n);
        CHECK_MSG(strstr(error.message, offset) == error.message, "cut at %zu: %s", n, error.message);
    }
    test_file_write("cut", data, size - 1);
    read_all(&te_io_posix, &m.mem, "cut", &error);
    CHECK_MSG(strstr(error.message, "tensor \"\""), "%s", error.message);
    data[size] = 'x'; /* where the terminator was */
    test_file_write("cut", data, size + 1);
    CHECK(read_all(&te_io_posix, &m.mem, "cut", &error) == -1 && strstr(error.message, "belong to no tensor"));
    te_mem_free(&te_mem_libc, data, size + 1);
    CHECK(m.bytes == 0);
}

/* Every byte of header and data altered in several ways: an error or a file that reads, never worse. */
static void test_flips(void)
{
    faulty_mem m;
    te_io_error error;
    char *data;
    size_t size;
    faulty_mem_init(&m);
    CHECK(read_file(&te_io_posix, &te_mem_libc, "sample", &data, &size, &error) == TE_OK);
    static const unsigned char masks[] = {0x01, 0x02, 0x10, 0x80, 0xff};
    for (size_t n = 0; n < size; n++)
        for (size_t k = 0; k < sizeof masks; k++) {
            data[n] = (char)(data[n] ^ masks[k]);
            test_file_write("flip", data, size);
            int count = read_all(&te_io_posix, &m.mem, "flip", &error);
            CHECK(count == -1 || count == 7);
            data[n] = (char)(data[n] ^ masks[k]);
        }
    te_mem_free(&te_mem_libc, data, size + 1);
    CHECK(m.bytes == 0);
}

#define T(body) "{\"t\":{\"dtype\":\"F32\"," body "}}"

static const struct {
    const char *json;
    size_t      data; /* bytes after the header */
    const char *message;
} hostile[] = {
    {"", 0, "not an object"},
    {"[]", 0, "not an object"},
    {" {}", 0, "not an object"},
    {"{", 0, "header: "},
    {"{}}", 0, "header: "},
    {"{} x", 0, "header: "},
    {"{\"a\\u0000b\":1}", 0, "header: "},
    {"{\"a\xff\":1}", 0, "header: "},
    {"{\"t\":1}", 0, "must be an object"},
    {"{\"t\":{}}", 0, "must be an object"},
    {T("\"shape\":[1],\"data_offsets\":[0,4],\"more\":1"), 4, "must be an object"},
    {T("\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,4]"), 4, "duplicate"},
    {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"t\":{\"dtype\":\"F32\",\"shape\":[1],"
     "\"data_offsets\":[4,8]}}", 8, "duplicate"},
    {"{\"t\":{\"dtype\":\"C64\",\"shape\":[1],\"data_offsets\":[0,8]}}", 8, "dtype \"C64\" is not one of F32"},
    {"{\"t\":{\"dtype\":\"I16\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "hold 4 bytes, dtype and shape need 2"},
    {"{\"t\":{\"dtype\":\"I8\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0, "overflows"},
    {"{\"t\":{\"dtype\":32,\"shape\":[1],\"data_offsets\":[0,8]}}", 8, "no text \"dtype\""},
    {T("\"shape\":1,\"data_offsets\":[0,4]"), 4, "no list \"shape\""},
    {T("\"shape\":[-1],\"data_offsets\":[0,4]"), 4, "integers from 0"},
    {T("\"shape\":[1.0],\"data_offsets\":[0,4]"), 4, "integers from 0"},
    {T("\"shape\":[\"1\"],\"data_offsets\":[0,4]"), 4, "integers from 0"},
    {T("\"shape\":[[1]],\"data_offsets\":[0,4]"), 4, "integers from 0"},
    {T("\"shape\":[null],\"data_offsets\":[0,4]"), 4, "integers from 0"},
    {T("\"shape\":[99999999999999999999],\"data_offsets\":[0,4]"), 4, "too big integer"},
    {T("\"shape\":[1e999],\"data_offsets\":[0,4]"), 4, "overflow"},
    {T("\"shape\":[9223372036854775807],\"data_offsets\":[0,4]"), 4, "overflows"},
    {T("\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]"), 0, "overflows"},
    {T("\"shape\":[0,4611686018427387904,4],\"data_offsets\":[0,0]"), 0, "overflows"},
    {T("\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]"), 4, "9 dimensions"},
    {T("\"shape\":[1],\"data_offsets\":[0]"), 4, "list of two integers"},
    {T("\"shape\":[1],\"data_offsets\":{}"), 4, "list of two integers"},
    {T("\"shape\":[1],\"data_offsets\":[0,4,8]"), 4, "list of two integers"},
    {T("\"shape\":[1],\"data_offsets\":[0,4.0]"), 4, "list of two integers"},
    {T("\"shape\":[1],\"data_offsets\":[-4,0]"), 4, "not a range"},
    {T("\"shape\":[1],\"data_offsets\":[4,0]"), 4, "not a range"},
    {T("\"shape\":[1],\"data_offsets\":[0,8]"), 8, "hold 8 bytes, dtype and shape need 4"},
    {T("\"shape\":[1],\"data_offsets\":[-9223372036854775807,9223372036854775807]"), 4, "not a range"},
    {T("\"shape\":[1],\"data_offsets\":[4,8]"), 8, "a hole"},
    {T("\"shape\":[1],\"data_offsets\":[9223372036854775803,9223372036854775807]"), 8, "a hole"},
    {T("\"shape\":[2000000000],\"data_offsets\":[0,8000000000]"), 8, "the file ends inside tensor \"t\""},
    {T("\"shape\":[1],\"data_offsets\":[0,4]"), 8, "belong to no tensor"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[2],"
     "\"data_offsets\":[4,12]}}", 12, "tensor \"b\" begins 4 bytes earlier"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[2],"
     "\"data_offsets\":[0,8]}}", 8, "tensor \"b\" begins 8 bytes earlier"},
    {"{\"__metadata__\":[]}", 0, "\"__metadata__\" must be an object"},
    {"{\"__metadata__\":{\"a\":1}}", 0, "metadata \"a\" must be a text"},
    {"{\"__metadata__\":{\"a\":{}}}", 0, "metadata \"a\" must be a text"},
    {"{\"t\":{\"dtype\":\"BOOL\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2, "BOOL holds the byte 2"},
};

static void write_header(const char *path, const char *json, size_t size, size_t data)
{
    char bytes[20000] = {0};
    for (int i = 0; i < 8; i++) bytes[i] = (char)(size >> 8 * i);
    memcpy(bytes + 8, json, size);
    memset(bytes + 8 + size, 2, data);
    test_file_write(path, bytes, 8 + size + data);
}

static void test_hostile(void)
{
    faulty_mem m;
    te_io_error error;
    faulty_mem_init(&m);
    for (size_t i = 0; i < sizeof hostile / sizeof *hostile; i++) {
        write_header("hostile", hostile[i].json, strlen(hostile[i].json), hostile[i].data);
        CHECK_MSG(read_all(&te_io_posix, &m.mem, "hostile", &error) == -1, "accepted: %s", hostile[i].json);
        CHECK_MSG(strstr(error.message, hostile[i].message) && strstr(error.message, "hostile: "), "%s: %s",
                  hostile[i].json, error.message);
    }
    char deep[18000];
    memset(deep, '[', sizeof deep);
    memcpy(deep, "{\"t\":", 5);
    write_header("hostile", deep, sizeof deep, 0);
    CHECK(read_all(&te_io_posix, &m.mem, "hostile", &error) == -1);
    write_header("hostile", "{}\0\0", 4, 0); /* padded with NUL instead of spaces */
    CHECK(read_all(&te_io_posix, &m.mem, "hostile", &error) == -1);

    static const uint64_t lengths[] = {3, 99999999, 100000001, UINT64_MAX, (uint64_t)1 << 63, UINT64_MAX - 7};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        long calls = m.calls;
        test_file_write("hostile", "\0\0\0\0\0\0\0\0{}", 10);
        FILE *file = fopen("hostile", "r+b");
        fwrite(&lengths[i], 8, 1, file);
        fclose(file);
        CHECK(read_all(&te_io_posix, &m.mem, "hostile", &error) == -1 && m.calls - calls <= 2);
    }
    write_header("hostile", "{}  ", 4, 0);
    CHECK(read_all(&te_io_posix, &m.mem, "hostile", &error) == 0);
    CHECK(read_all(&te_io_posix, &m.mem, "absent", &error) == -1 && strstr(error.message, "No such file"));
    CHECK(m.bytes == 0);
}

/* Whole numbers that tensors do not have become wider ones; other dtypes are in nobody's way until they are read. */
static void test_foreign_dtypes(void)
{
    static const char json[] = "{\"c\":{\"dtype\":\"C64\",\"shape\":[1],\"data_offsets\":[0,8]},"
                               "\"i8\":{\"dtype\":\"I8\",\"shape\":[3],\"data_offsets\":[8,11]},"
                               "\"i16\":{\"dtype\":\"I16\",\"shape\":[2],\"data_offsets\":[11,15]},"
                               "\"u16\":{\"dtype\":\"U16\",\"shape\":[1,2],\"data_offsets\":[15,19]},"
                               "\"u32\":{\"dtype\":\"U32\",\"shape\":[2],\"data_offsets\":[19,27]}}";
    static const unsigned char numbers[] = {0x80, 0x7f, 0xff, 0x00, 0x80, 0xff, 0x7f, 0xff, 0xff, 0x01, 0x00,
                                            0xff, 0xff, 0xff, 0xff, 0x02, 0x01, 0x00, 0x00};
    char            bytes[512] = {0};
    size_t          size = sizeof json - 1;
    te_io_error     error;
    te_safetensors *st;
    for (int i = 0; i < 8; i++) bytes[i] = (char)(size >> 8 * i);
    memcpy(bytes + 8, json, size);
    memcpy(bytes + 8 + size + 8, numbers, sizeof numbers);
    test_file_write("foreign", bytes, 8 + size + 8 + sizeof numbers);
    CHECK_MSG(te_safetensors_open(&st, &te_io_posix, &te_mem_libc, "foreign", &error) == TE_OK, "%s", error.message);
    const te_safetensors_entry *e = te_safetensors_get(st, find(st, "c"));
    CHECK(e->dtype == TE_DTYPE_COUNT && !strcmp(e->stored, "C64") && e->bytes == 8);
    int32_t narrow[3];
    int64_t wide[2];
    CHECK(te_safetensors_read(st, find(st, "c"), wide, 8, &error) == TE_ERROR_UNSUPPORTED);
    CHECK_MSG(strstr(error.message, "tensor \"c\": dtype \"C64\" is not one of F32"), "%s", error.message);
    CHECK(te_safetensors_read(st, find(st, "i8"), narrow, 3, &error) == TE_ERROR_ARGUMENT);
    CHECK(te_safetensors_read(st, find(st, "i8"), narrow, 12, &error) == TE_OK);
    CHECK(narrow[0] == -128 && narrow[1] == 127 && narrow[2] == -1);
    e = te_safetensors_get(st, find(st, "i16"));
    CHECK(e->dtype == TE_I32 && !strcmp(e->stored, "I16") && e->bytes == 4 && e->size == 8);
    CHECK(te_safetensors_read(st, find(st, "i16"), narrow, 8, &error) == TE_OK);
    CHECK(narrow[0] == -32768 && narrow[1] == 32767);
    CHECK(te_safetensors_read(st, find(st, "u16"), narrow, 8, &error) == TE_OK);
    CHECK(narrow[0] == 65535 && narrow[1] == 1);
    CHECK(te_safetensors_get(st, find(st, "u32"))->dtype == TE_I64);
    CHECK(te_safetensors_read(st, find(st, "u32"), wide, 16, &error) == TE_OK);
    CHECK(wide[0] == 4294967295 && wide[1] == 258);
    te_safetensors_close(st);
}

static void test_refusals(void)
{
    te_io_error error;
    const te_safetensors_item good = {.name = "t", .dtype = TE_F32, .ndim = 1, .shape = {2}, .data = weights};
    te_safetensors_item items[2] = {good, good};
    te_safetensors_contents c = {.items = items, .n_items = 1};
    test_file_write("kept", "old", 3);
#define REFUSED(text)                                                                            \
    CHECK(te_safetensors_write(&te_io_posix, &te_mem_libc, "kept", &c, &error) == TE_ERROR_ARGUMENT); \
    CHECK_MSG(strstr(error.message, text), "%s", error.message);                                 \
    items[0] = good
    static const char *const bad_names[] = {"a\xff", "\x80", "\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80",
                                            "\xf4\x90\x80\x80", "\xf0\x80\x80\x80", "a\xe2\x82",
                                            "\xf8\x88\x80\x80\x80"};
    for (size_t i = 0; i < sizeof bad_names / sizeof *bad_names; i++) {
        items[0].name = bad_names[i];
        REFUSED("UTF-8");
    }
    items[0].name = NULL;
    REFUSED("missing");
    items[0].name = "__metadata__";
    REFUSED("keeps this name");
    items[0].dtype = TE_DTYPE_COUNT;
    REFUSED("no such dtype");
    items[0].ndim = TE_MAX_DIMS + 1;
    REFUSED("number of dimensions");
    items[0].shape[0] = -1;
    REFUSED("negative");
    items[0].shape[0] = INT64_MAX / 2;
    REFUSED("overflows");
    items[0].shape[0] = INT64_MAX / 4;
    REFUSED("overflow 64 bits");
    items[0].data = NULL;
    REFUSED("no data");
    c.n_items = 2;
    REFUSED("two tensors are called \"t\"");
    c.n_items = 0;
    const te_safetensors_pair pairs[] = {{"k", "1"}, {"k", "2"}}, bad[] = {{"k", "\xff"}};
    c.metadata = pairs;
    c.n_metadata = 2;
    REFUSED("two metadata keys");
    c.metadata = bad;
    c.n_metadata = 1;
    REFUSED("UTF-8");
    char *data;
    size_t size;
    CHECK(read_file(&te_io_posix, &te_mem_libc, "kept", &data, &size, &error) == TE_OK && !strcmp(data, "old"));
    te_mem_free(&te_mem_libc, data, size + 1);
}

/* --- failures --------------------------------------------------------------------------------------------------- */

static void test_failing_calls(void)
{
    faulty_io f;
    faulty_mem m;
    te_io_error error;
    faulty_io_init(&f);
    faulty_mem_init(&m);
    long n = 1;
    for (bool done = false; !done && n < 200; n++) {
        faulty_io_arm(&f, n);
        te_status status = te_safetensors_write(&f.io, &m.mem, "sample", &sample, &error);
        done = atomic_load(&f.calls) < n;
        CHECK(done ? status == TE_OK : status == TE_OK || status == TE_ERROR_IO);
        CHECK(read_all(&te_io_posix, &m.mem, "sample", &error) == 7); /* old or new, both whole */
        CHECK(test_folder_count(".", ".tmp", true) == 0 && atomic_load(&f.open_files) == 0 && m.bytes == 0);
    }
    CHECK(n > 12);
    n = 1;
    for (bool done = false; !done && n < 200; n++) {
        faulty_io_arm(&f, n);
        int count = read_all(&f.io, &m.mem, "sample", &error);
        done = atomic_load(&f.calls) < n;
        CHECK(done ? count == 7 : count == -1 || n == atomic_load(&f.calls)); /* the last call, close, may fail */
        CHECK(atomic_load(&f.open_files) == 0 && m.bytes == 0);
    }
    CHECK(n > 10);
}

static void test_failing_memory(void)
{
    faulty_mem m;
    te_io_error error;
    faulty_mem_init(&m);
    bool done = false;
    for (long n = 1; !done && n < 100; n++) {
        m.calls = 0;
        m.fail_at = n;
        te_status status = te_safetensors_write(&te_io_posix, &m.mem, "memory", &sample, &error);
        done = m.calls < n;
        CHECK(status == (done ? TE_OK : TE_ERROR_MEMORY) && m.bytes == 0);
    }
    done = false;
    for (long n = 1; !done && n < 100; n++) {
        m.calls = 0;
        m.fail_at = n;
        int count = read_all(&te_io_posix, &m.mem, "memory", &error);
        done = m.calls < n;
        CHECK((done ? count == 7 : count == -1 && error.status == TE_ERROR_MEMORY) && m.bytes == 0);
    }
    CHECK(test_folder_count(".", ".tmp", false) == 0);
}

/* A child saves again and again, all bytes of one value; it is killed at some moment. What is there must be whole.
 * Nothing in this program starts threads, so the child of fork is complete; it ends with its parent. */
static void test_kill(void)
{
    pid_t parent = getpid();
    enum { N = 300000, ROUNDS = 25 };
    te_io_error error;
    uint8_t *data = malloc(N);
    te_safetensors_item item = {.name = "t", .dtype = TE_U8, .ndim = 1, .shape = {N}, .data = data};
    te_safetensors_contents contents = {.items = &item, .n_items = 1};
    memset(data, 0, N);
    CHECK(te_safetensors_write(&te_io_posix, &te_mem_libc, "killed", &contents, &error) == TE_OK);
    uint64_t random = 88172645463325252u;
    for (int round = 0; round < ROUNDS; round++) {
        pid_t child = fork();
        if (child == 0) {
            for (int value = 1; getppid() == parent; value++) {
                memset(data, value, N);
                te_safetensors_write(&te_io_posix, &te_mem_libc, "killed", &contents, &error);
            }
            _exit(1);
        }
        usleep(500 + test_random(&random) % 20000);
        CHECK(child > 0 && kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
        te_safetensors *st;
        te_status status = te_safetensors_open(&st, &te_io_posix, &te_mem_libc, "killed", &error);
        CHECK_MSG(status == TE_OK, "%s", error.message);
        if (status != TE_OK) continue;
        CHECK(te_safetensors_read(st, 0, data, N, &error) == TE_OK);
        CHECK(memcmp(data, data + 1, N - 1) == 0); /* all equal */
        te_safetensors_close(st);
    }
    free(data);
}

int main(void)
{
    char folder[512];
    test_folder_enter(folder, sizeof folder, "safetensors");
    test_round_trip();
    test_pieces();
    test_cuts();
    test_flips();
    test_hostile();
    test_foreign_dtypes();
    test_refusals();
    test_failing_calls();
    test_failing_memory();
    test_kill();
    test_folder_leave(folder);
    return TEST_END();
}

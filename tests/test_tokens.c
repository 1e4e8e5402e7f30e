/* test_tokens.c - streams of every format, batches, and the prefetch thread at awkward moments. */
#include "core/tokens.h"
#include "faulty_io.h"
#include "kernels/philox.h"

#include <sys/wait.h>
#include <unistd.h>

/* --- shards ----------------------------------------------------------------------------------------------------- */

/* Token at a position of the test streams: differs from its neighbours, below 60,000. */
static int32_t token_at(int64_t position) { return (int32_t)((uint64_t)position * 2654435761u % 59999u); }

typedef enum format { RAW, GPT2, LLAMA } format;

static void write_shard(const char *path, format f, int64_t first, int64_t count)
{
    int32_t header[256] = {f == GPT2 ? 20240520 : 20240801, f == GPT2 ? 1 : 7, (int32_t)count};
    FILE *file = fopen(path, "wb");
    if (!file) abort();
    if (f != RAW) fwrite(header, 1, sizeof header, file);
    for (int64_t i = 0; i < count; i++) {
        uint32_t id = (uint32_t)token_at(first + i);
        fwrite(&id, 1, f == LLAMA ? 4 : 2, file); /* little-endian */
    }
    fclose(file);
}

/* 20,000 tokens in five shards of all formats, one of them empty. */
enum { LENGTH = 20000 };

static void write_shards(void)
{
    te_io_error error;
    te_io_make_folder(&te_io_posix, &te_mem_libc, "shards", &error);
    write_shard("shards/a_0.bin", RAW, 0, 7000);
    write_shard("shards/a_1.bin", GPT2, 7000, 1);
    write_shard("shards/b_0.bin", GPT2, 7001, 0);
    write_shard("shards/b_1.bin", LLAMA, 7001, 4999);
    write_shard("shards/b_2.bin", GPT2, 12000, 8000);
    test_file_write("shards/notes.txt", "not tokens", 10);
}

static te_status open_one(te_token_stream **stream, const te_io *io, const te_mem *mem, const char *path,
                          te_io_error *error)
{
    return te_token_stream_open(stream, io, mem, &path, 1, error);
}

static void test_stream(void)
{
    faulty_io f;
    faulty_mem m;
    te_io_error error;
    te_token_stream *stream;
    te_token_reader reader;
    faulty_io_init(&f);
    faulty_mem_init(&m);
    int32_t *ids = malloc(LENGTH * sizeof *ids);
    for (int stutter = 0; stutter < 2; stutter++) {
        f.stutter = stutter;
        CHECK_MSG(open_one(&stream, &f.io, &m.mem, "shards", &error) == TE_OK, "%s", error.message);
        CHECK(te_token_stream_length(stream) == LENGTH);
        te_token_reader_open(&reader, stream, &f.io);
        const int64_t ranges[][2] = {{0, LENGTH}, {0, 0}, {6999, 3}, {7000, 1}, {7001, 5000}, {11999, 2},
                                     {LENGTH - 1, 1}, {LENGTH, 0}};
        for (size_t r = 0; r < sizeof ranges / sizeof *ranges; r++) {
            CHECK(te_token_reader_read(&reader, ranges[r][0], ranges[r][1], ids, &error) == TE_OK);
            for (int64_t i = 0; i < ranges[r][1]; i++)
                if (ids[i] != token_at(ranges[r][0] + i)) CHECK_MSG(false, "token %lld", (long long)(ranges[r][0] + i));
        }
        CHECK(te_token_reader_read(&reader, LENGTH, 1, ids, &error) == TE_ERROR_ARGUMENT);
        CHECK(te_token_reader_read(&reader, -1, 1, ids, &error) == TE_ERROR_ARGUMENT);
        CHECK(te_token_reader_read(&reader, 5, INT64_MAX, ids, &error) == TE_ERROR_ARGUMENT);
        te_token_reader_close(&reader);
        te_token_stream_close(stream);
    }
    free(ids);
    const char *lists[][2] = {{"shards/a_*.bin", "shards/b_?.bin"}, {"shards/a_*", "shards/b_*"}};
    for (int i = 0; i < 2; i++) {
        CHECK(te_token_stream_open(&stream, &te_io_posix, &m.mem, lists[i], 2, &error) == TE_OK);
        CHECK(stream && te_token_stream_length(stream) == LENGTH);
        te_token_stream_close(stream);
    }
    CHECK(atomic_load(&f.open_files) == 0 && m.bytes == 0);
}

static void test_many_shards(void)
{
    faulty_io f;
    te_io_error error;
    te_token_stream *stream;
    te_token_reader reader;
    faulty_io_init(&f);
    te_io_make_folder(&te_io_posix, &te_mem_libc, "many", &error);
    for (int i = 0; i < 50; i++) {
        char path[64];
        snprintf(path, sizeof path, "many/%02d.bin", i);
        write_shard(path, GPT2, i * 10, 10);
    }
    CHECK(open_one(&stream, &f.io, &te_mem_libc, "many/*.bin", &error) == TE_OK);
    te_token_reader_open(&reader, stream, &f.io);
    uint64_t random = 7;
    for (int i = 0; i < 500; i++) {
        int64_t at = test_random(&random) % 480;
        int32_t ids[20];
        CHECK(te_token_reader_read(&reader, at, 20, ids, &error) == TE_OK);
        for (int j = 0; j < 20; j++) CHECK(ids[j] == token_at(at + j));
        CHECK(atomic_load(&f.open_files) <= TE_TOKEN_READER_FILES);
    }
    te_token_reader_close(&reader);
    te_token_stream_close(stream);
    CHECK(atomic_load(&f.open_files) == 0);
    test_folder_count("many", "", true);
}

static void test_damage(void)
{
    faulty_mem m;
    te_io_error error;
    te_token_stream *stream;
    faulty_mem_init(&m);
#define BROKEN(path, text)                                                             \
    CHECK(open_one(&stream, &te_io_posix, &m.mem, path, &error) == TE_ERROR_IO && !stream); \
    CHECK_MSG(strstr(error.message, text) && strstr(error.message, path), "%s", error.message)
    test_file_write("odd", "abc", 3);
    BROKEN("odd", "3 bytes are not a whole number");
    test_file_write("none", "", 0);
    BROKEN("none", "no tokens");
    write_shard("damaged", GPT2, 0, 100);
    for (int64_t size = 4; size < 1024 + 200; size++) {
        if (truncate("damaged", size) != 0) abort();
        BROKEN("damaged", size < 1024 ? "ends inside its header" : "the header counts 100 tokens of 2 bytes");
        write_shard("damaged", GPT2, 0, 100);
    }
    if (truncate("damaged", 1024 + 201) != 0) abort();
    BROKEN("damaged", "201 bytes follow");
    int32_t header[256] = {20240520, 2, 0};
    test_file_write("damaged", header, sizeof header);
    BROKEN("damaged", "version 2");
    header[1] = 1;
    header[2] = -1;
    test_file_write("damaged", header, sizeof header);
    BROKEN("damaged", "counts -1 tokens");
    header[0] = 20240522;
    test_file_write("damaged", header, sizeof header);
    BROKEN("damaged", "multiple-choice");
    BROKEN("absent", "No such file");
    CHECK(open_one(&stream, &te_io_posix, &m.mem, "absent/*.bin", &error) == TE_ERROR_IO);
    CHECK(strstr(error.message, "absent/: cannot list"));
    BROKEN("*.absent", "no file matches");
    te_io_make_folder(&te_io_posix, &te_mem_libc, "hollow", &error);
    BROKEN("hollow", "no file matches *.bin");
    CHECK(te_token_stream_open(&stream, &te_io_posix, &m.mem, NULL, 0, &error) == TE_ERROR_IO);

    te_token_reader reader;
    int32_t ids[100];
    write_shard("shrunk", RAW, 0, 100);
    CHECK(open_one(&stream, &te_io_posix, &m.mem, "shrunk", &error) == TE_OK);
    if (truncate("shrunk", 50) != 0) abort();
    te_token_reader_open(&reader, stream, &te_io_posix);
    CHECK(te_token_reader_read(&reader, 0, 100, ids, &error) == TE_ERROR_IO);
    CHECK_MSG(strstr(error.message, "shrunk: offset 50: the file ends here"), "%s", error.message);
    te_token_reader_close(&reader);
    te_token_stream_close(stream);

    uint32_t large[257] = {20240801, 7, 1};
    large[256] = 0x80000000u;
    test_file_write("large", large, sizeof large);
    CHECK(open_one(&stream, &te_io_posix, &m.mem, "large", &error) == TE_OK);
    te_token_reader_open(&reader, stream, &te_io_posix);
    CHECK(te_token_reader_read(&reader, 0, 1, ids, &error) == TE_ERROR_IO && strstr(error.message, "2147483648"));
    te_token_reader_close(&reader);
    te_token_stream_close(stream);
    CHECK(m.bytes == 0);
}

static void test_open_failures(void)
{
    faulty_io f;
    faulty_mem m;
    te_io_error error;
    te_token_stream *stream;
    faulty_io_init(&f);
    faulty_mem_init(&m);
    for (int pattern = 0; pattern < 2; pattern++) {
        const char *path = pattern ? "shards/*.bin" : "shards";
        bool done = false;
        for (long n = 1; !done && n < 100; n++) {
            faulty_io_arm(&f, n);
            te_status status = open_one(&stream, &f.io, &m.mem, path, &error);
            done = atomic_load(&f.calls) < n;
            CHECK(!done || status == TE_OK); /* a close that fails may be ignored */
            te_token_stream_close(stream);
            CHECK(atomic_load(&f.open_files) == 0 && m.bytes == 0);
        }
        faulty_io_arm(&f, 0);
        done = false;
        for (long n = 1; !done && n < 100; n++) {
            m.calls = 0;
            m.fail_at = n;
            te_status status = open_one(&stream, &f.io, &m.mem, path, &error);
            done = m.calls < n;
            CHECK(status == (done ? TE_OK : TE_ERROR_MEMORY));
            te_token_stream_close(stream);
            CHECK(atomic_load(&f.open_files) == 0 && m.bytes == 0);
        }
        m.fail_at = 0;
    }
}

/* --- batches ---------------------------------------------------------------------------------------------------- */

static int released;
static void count_release(void *user) { released += *(int *)user; }

static int64_t batch_id(const te_tokens_options *o, const void *ids, int64_t i)
{
    return o->dtype == TE_I32 ? ((const int32_t *)ids)[i] : ((const int64_t *)ids)[i];
}

/* Every row is a piece of the stream inside [begin, end), and y is x shifted by one. */
static bool batch_fits(const te_tokens_options *o, const te_tokens_batch *batch)
{
    for (int64_t row = 0; row < o->batch; row++) {
        int64_t start = o->begin + (batch->index * o->batch + row) * o->block;
        if (!o->sequential) {
            te_philox_words w = te_rng_group(o->rng, (uint64_t)(batch->index * o->batch + row));
            double fraction = (w.word[1] + w.word[0] * 0x1p-32) * 0x1p-32;
            start = o->begin + (int64_t)(fraction * (double)(o->end - o->begin - o->block));
        }
        if (start < o->begin || start + o->block + 1 > o->end) return false;
        for (int64_t i = 0; i < o->block; i++) {
            if (batch_id(o, batch->x, row * o->block + i) != token_at(start + i)) return false;
            if (batch_id(o, batch->y, row * o->block + i) != token_at(start + i + 1)) return false;
        }
    }
    return true;
}

static void test_batches(te_token_stream *stream)
{
    faulty_mem m;
    te_io_error error;
    faulty_mem_init(&m);
    for (int kind = 0; kind < 16; kind++) {
        te_tokens_options o = {.begin = 100, .end = 19000, .batch = 4, .block = 33, .rng = {1337, 5, 11, NULL}};
        o.dtype = kind & 1 ? TE_I64 : TE_I32;
        o.sequential = kind & 2;
        o.prefetch = (kind >> 2) * 2 - (kind >> 2 == 3); /* 0, 2, 4, 5 */
        te_tokens *t;
        te_tokens_batch batch;
        CHECK_MSG(te_tokens_open(&t, &te_io_posix, &m.mem, stream, &o, &error) == TE_OK, "%s", error.message);
        CHECK(te_tokens_batches(t) == (o.sequential ? 18899 / 132 : 0));
        static const int64_t jumps[] = {0, 7, 3, 142, 0, 0};
        for (size_t j = 0; j < sizeof jumps / sizeof *jumps; j++) {
            CHECK(te_tokens_seek(t, jumps[j], &error) == TE_OK);
            for (int64_t s = jumps[j]; s < jumps[j] + 6; s++) {
                CHECK(te_tokens_position(t) == s);
                CHECK(te_tokens_next(t, &batch, &error) == TE_OK && batch.index == s);
                if (o.sequential) batch.index %= te_tokens_batches(t);
                CHECK(batch_fits(&o, &batch));
            }
        }
        CHECK(te_tokens_seek(t, -1, &error) == TE_ERROR_ARGUMENT && te_tokens_position(t) == 6);
        te_tokens_close(t);
    }
    CHECK(m.bytes == 0);
}

static void test_smallest(void)
{
    static const uint16_t ids[4] = {3, 1, 65535, 2};
    faulty_mem m;
    te_io_error error;
    te_token_stream *stream;
    te_tokens *t;
    te_tokens_batch batch;
    int one = 1;
    faulty_mem_init(&m);
    te_token_memory memory = {.tokens = ids, .type = TE_TOKEN_U16, .count = 4, .release = count_release, .user = &one};
    CHECK(te_token_stream_from_memory(&stream, &m.mem, &memory, &error) == TE_OK);
    te_tokens_options o = {.begin = 0, .end = 4, .batch = 1, .block = 3, .dtype = TE_I32, .prefetch = 2};
    CHECK(te_tokens_open(&t, &te_io_posix, &m.mem, stream, &o, &error) == TE_OK);
    te_token_stream_close(stream); /* the loader keeps it */
    for (int i = 0; i < 5; i++) { /* one position only */
        CHECK(te_tokens_next(t, &batch, &error) == TE_OK);
        CHECK(!memcmp(batch.x, (int32_t[]){3, 1, 65535}, 12) && !memcmp(batch.y, (int32_t[]){1, 65535, 2}, 12));
    }
    CHECK(released == 0);
    te_tokens *bounded;
    for (o.prefetch = 0; o.prefetch <= 2; o.prefetch += 2) {
        o.vocab_size = 65535;
        CHECK(te_tokens_open(&bounded, &te_io_posix, &m.mem, stream, &o, &error) == TE_OK);
        for (int i = 0; i < 2; i++) CHECK(te_tokens_next(bounded, &batch, &error) == TE_ERROR_IO);
        CHECK_MSG(!strcmp(error.message, "token 2 is 65535, of a vocabulary of 65535"), "%s", error.message);
        te_tokens_close(bounded);
        o.vocab_size = 65536;
        CHECK(te_tokens_open(&bounded, &te_io_posix, &m.mem, stream, &o, &error) == TE_OK);
        CHECK(te_tokens_next(bounded, &batch, &error) == TE_OK);
        te_tokens_close(bounded);
    }
    te_tokens_close(t);
    CHECK(released == 1 && m.bytes == 0);

    int32_t wide[3] = {5, 6, -1};
    memory = (te_token_memory){.tokens = wide, .type = TE_TOKEN_U32, .count = 3};
    CHECK(te_token_stream_from_memory(&stream, &m.mem, &memory, &error) == TE_ERROR_ARGUMENT);
    CHECK_MSG(strstr(error.message, "token 2 is -1"), "%s", error.message);
    memory.count = 2;
    CHECK(te_token_stream_from_memory(&stream, &m.mem, &memory, &error) == TE_OK);
    te_token_stream_close(stream);
    memory.count = 0;
    CHECK(te_token_stream_from_memory(&stream, &m.mem, &memory, &error) == TE_ERROR_ARGUMENT);
}

static void test_option_refusals(te_token_stream *stream)
{
    te_io_error error;
    te_tokens *t;
    const te_tokens_options good = {.begin = 0, .end = 100, .batch = 2, .block = 10, .dtype = TE_I32};
    te_tokens_options o = good;
#define REFUSED(change)                                                                                       \
    o = good;                                                                                                 \
    change;                                                                                                   \
    CHECK(te_tokens_open(&t, &te_io_posix, &te_mem_libc, stream, &o, &error) == TE_ERROR_ARGUMENT && t == NULL)
    REFUSED(o.begin = -1);
    REFUSED(o.end = LENGTH + 1);
    REFUSED(o.begin = 101);
    REFUSED(o.batch = 0);
    REFUSED(o.block = 0);
    REFUSED(o.batch = o.block = INT64_MAX);
    REFUSED(o.dtype = TE_F32);
    REFUSED(o.vocab_size = -1);
    REFUSED(o.prefetch = -1);
    REFUSED(o.prefetch = TE_TOKENS_MAX_PREFETCH + 1);
    REFUSED(o.block = 100);
    REFUSED((o.end = 20, o.sequential = true));
    faulty_mem m;
    faulty_mem_init(&m);
    for (long n = 1; n <= 2; n++) {
        m.calls = 0;
        m.fail_at = n;
        CHECK(te_tokens_open(&t, &te_io_posix, &m.mem, stream, &good, &error) == TE_ERROR_MEMORY && m.bytes == 0);
    }
    m.fail_at = 0;
    o = good;
    o.batch = (int64_t)1 << 50; /* larger than any memory */
    CHECK(te_tokens_open(&t, &te_io_posix, &m.mem, stream, &o, &error) == TE_ERROR_MEMORY && m.bytes == 0);
}

/* Any read may fail: batches before it arrive, the failure comes in its place, and the same batch follows. */
static void test_thread_errors(te_token_stream *stream)
{
    faulty_io f;
    te_io_error error;
    te_tokens *t;
    te_tokens_batch batch;
    te_tokens_options o = {.begin = 0, .end = LENGTH, .batch = 2, .block = 50, .dtype = TE_I32, .rng = {1, 2, 3, NULL}};
    for (o.prefetch = 0; o.prefetch <= 3; o.prefetch++)
        for (long n = 1; n < 30; n++) {
            faulty_io_init(&f);
            faulty_io_arm(&f, n);
            CHECK(te_tokens_open(&t, &f.io, &te_mem_libc, stream, &o, &error) == TE_OK);
            int failures = 0;
            for (int64_t s = 0; s < 12;) {
                te_status status = te_tokens_next(t, &batch, &error);
                if (status == TE_OK) {
                    CHECK(batch.index == s && batch_fits(&o, &batch));
                    s++;
                } else {
                    failures++;
                    CHECK(status == TE_ERROR_IO && strstr(error.message, "Input/output error"));
                    CHECK(te_tokens_position(t) == s);
                }
            }
            CHECK(failures <= 1);
            te_tokens_close(t);
            CHECK(atomic_load(&f.open_files) == 0);
        }
    faulty_io_init(&f);
    f.fail_on = true;
    faulty_io_arm(&f, 1);
    o.prefetch = 2;
    CHECK(te_tokens_open(&t, &f.io, &te_mem_libc, stream, &o, &error) == TE_OK);
    for (int i = 0; i < 20; i++) {
        CHECK(te_tokens_next(t, &batch, &error) == TE_ERROR_IO);
        CHECK(te_tokens_seek(t, i, &error) == TE_OK);
    }
    te_tokens_close(t);
}

/* Open, seek and close while the thread is anywhere. */
static void test_thread_moments(te_token_stream *stream)
{
    te_io_error error;
    te_tokens *t;
    te_tokens_batch batch;
    uint64_t random = 99;
    te_tokens_options o = {.begin = 0, .end = LENGTH, .batch = 3, .block = 64, .dtype = TE_I64, .rng = {1, 2, 3, NULL}};
    for (int round = 0; round < 300; round++) {
        o.prefetch = 1 + (int)(test_random(&random) % TE_TOKENS_MAX_PREFETCH);
        CHECK(te_tokens_open(&t, &te_io_posix, &te_mem_libc, stream, &o, &error) == TE_OK);
        int64_t position = 0;
        for (uint32_t step = test_random(&random) % 12; step > 0; step--) {
            uint32_t what = test_random(&random) % 4;
            if (what == 0) usleep(test_random(&random) % 100);
            if (what == 1) CHECK(te_tokens_seek(t, position = test_random(&random) % 1000, &error) == TE_OK);
            if (what < 2) continue;
            CHECK(te_tokens_next(t, &batch, &error) == TE_OK && batch.index == position++);
            CHECK(batch_fits(&o, &batch));
        }
        te_tokens_close(t);
    }
}

#ifndef __SANITIZE_THREAD__
/* In a child of fork the thread is not there, wherever it was: the child reads on by itself, seeks and closes. */
static void test_fork(te_token_stream *stream)
{
    te_tokens_options o = {.begin = 3, .end = 400, .batch = 2, .block = 7, .dtype = TE_I32, .prefetch = 3};
    te_tokens_batch   batch;
    te_io_error       error;
    for (int round = 0; round < 20; round++) {
        te_tokens *t = NULL;
        CHECK(te_tokens_open(&t, &te_io_posix, &te_mem_libc, stream, &o, &error) == TE_OK);
        for (int i = 0; i < round % 4; i++) te_tokens_next(t, &batch, &error);
        pid_t child = fork();
        if (child == 0) alarm(60);
        for (int i = round % 4; i < 8; i++)
            CHECK(te_tokens_position(t) == i && te_tokens_next(t, &batch, &error) == TE_OK && batch.index == i &&
                  batch_fits(&o, &batch));
        CHECK(te_tokens_seek(t, 2, &error) == TE_OK && te_tokens_next(t, &batch, &error) == TE_OK && batch.index == 2);
        te_tokens_close(t);
        if (child == 0) _exit(test_failures != 0);
        int status = -1;
        CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    }
}
#endif

/* What is written reads back, in both types; what cannot be written leaves the file that was there. */
static void test_writing(void)
{
    faulty_io        f;
    faulty_mem       m;
    te_io_error      error;
    te_token_stream *stream, *back;
    faulty_io_init(&f);
    faulty_mem_init(&m);
    int32_t *ids = malloc(LENGTH * sizeof *ids), *read = malloc(LENGTH * sizeof *ids);
    CHECK(open_one(&stream, &f.io, &m.mem, "shards", &error) == TE_OK);
    for (int type = TE_TOKEN_U16; type <= TE_TOKEN_U32; type++) {
        te_token_reader reader;
        CHECK(te_token_stream_write(stream, &f.io, &m.mem, "written.bin", (te_token_type)type, &error) == TE_OK);
        FILE *file = fopen("written.bin", "rb");
        int32_t header[256] = {0};
        CHECK(file && fread(header, 4, 256, file) == 256 && header[2] == LENGTH && header[255] == 0);
        CHECK(header[0] == (type == TE_TOKEN_U16 ? 20240520 : 20240801) && header[1] == (type == TE_TOKEN_U16 ? 1 : 7));
        CHECK(file && fseek(file, 0, SEEK_END) == 0 && ftell(file) == 1024 + LENGTH * (type == TE_TOKEN_U16 ? 2 : 4));
        if (file) fclose(file);
        CHECK(open_one(&back, &f.io, &m.mem, "written.bin", &error) == TE_OK);
        te_token_reader_open(&reader, back, &f.io);
        CHECK(te_token_reader_read(&reader, 0, LENGTH, read, &error) == TE_OK);
        for (int64_t i = 0; i < LENGTH; i++) CHECK(read[i] == token_at(i));
        te_token_reader_close(&reader);
        te_token_stream_close(back);
    }
    faulty_io_arm(&f, 0);
    CHECK(te_token_stream_write(stream, &f.io, &m.mem, "again.bin", TE_TOKEN_U16, &error) == TE_OK);
    long calls = atomic_load(&f.calls), refused = 0, there = 0;
    for (long at = 1; at <= calls; at++) {
        faulty_io_arm(&f, at);
        refused += te_token_stream_write(stream, &f.io, &m.mem, "never.bin", TE_TOKEN_U16, &error) != TE_OK;
        faulty_io_arm(&f, 0);
        there += unlink("never.bin") == 0;
    }
    CHECK(calls > 10 && refused > calls / 2 && refused + there <= calls + 1); /* + 1: when the folder is not flushed */
    te_token_stream_close(stream);
    for (int i = 0; i < 5000; i++) ids[i] = i == 4999 ? 65536 : 65535;
    te_token_memory memory = {.tokens = ids, .type = TE_TOKEN_U32, .count = 5000};
    CHECK(te_token_stream_from_memory(&stream, &m.mem, &memory, &error) == TE_OK);
    CHECK(te_token_stream_write(stream, &f.io, &m.mem, "written.bin", TE_TOKEN_U16, &error) == TE_ERROR_ARGUMENT);
    CHECK_MSG(strstr(error.message, "token 4999 is 65536"), "%s", error.message);
    CHECK(open_one(&back, &f.io, &m.mem, "written.bin", &error) == TE_OK && te_token_stream_length(back) == LENGTH);
    te_token_stream_close(back);
    te_token_stream_close(stream);
    CHECK(atomic_load(&f.open_files) == 0 && m.bytes == 0);
    free(ids);
    free(read);
}

/* Starts cover the whole part evenly, with both ends. */
static void test_spread(void)
{
    enum { POSITIONS = 10, DRAWS = 20000, BLOCK = 4 };
    int32_t ids[POSITIONS + BLOCK];
    for (int i = 0; i < POSITIONS + BLOCK; i++) ids[i] = i;
    te_io_error error;
    te_token_stream *stream;
    te_tokens *t;
    te_tokens_batch batch;
    te_token_memory memory = {.tokens = ids, .type = TE_TOKEN_U32, .count = POSITIONS + BLOCK};
    CHECK(te_token_stream_from_memory(&stream, &te_mem_libc, &memory, &error) == TE_OK);
    te_tokens_options o = {.end = POSITIONS + BLOCK, .batch = DRAWS, .block = BLOCK, .dtype = TE_I32, .rng.seed = 42};
    CHECK(te_tokens_open(&t, &te_io_posix, &te_mem_libc, stream, &o, &error) == TE_OK);
    CHECK(te_tokens_next(t, &batch, &error) == TE_OK);
    int seen[POSITIONS] = {0};
    for (int i = 0; i < DRAWS; i++) seen[((const int32_t *)batch.x)[i * BLOCK]]++;
    for (int i = 0; i < POSITIONS; i++)
        CHECK_MSG(abs(seen[i] - DRAWS / POSITIONS) < 250, "start %d: %d times", i, seen[i]);
    te_tokens_close(t);
    te_token_stream_close(stream);
}

int main(void)
{
    char folder[512];
    test_folder_enter(folder, sizeof folder, "tokens");
    write_shards();
    test_stream();
    test_many_shards();
    test_damage();
    test_open_failures();
    test_writing();
    te_io_error error;
    te_token_stream *stream = NULL;
    CHECK(open_one(&stream, &te_io_posix, &te_mem_libc, "shards", &error) == TE_OK);
    if (stream) {
        test_batches(stream);
        test_option_refusals(stream);
        test_thread_errors(stream);
        test_thread_moments(stream);
#ifndef __SANITIZE_THREAD__
        test_fork(stream);
#endif
    }
    te_token_stream_close(stream);
    test_smallest();
    test_spread();
    test_folder_count("shards", "", true);
    test_folder_leave(folder);
    return TEST_END();
}

/* A driver's management library that knows the chips a text file describes: the driver boundary of the Ascend tests.
 *
 * The file's path is in FAKE_DCMI. Lines (fields in this order, "-" for none):
 *   init CODE                    result of dcmi_init          (default 0)
 *   v2init CODE                  result of dcmiv2_init        (default -8255)
 *   chip CARD CHIP TYPE LOGICAL PHYSICAL HEALTH HBM USED DDR AVAILABLE NAME NPUNAME DOMAIN BUS DIE POWER TEMP UTIL
 *   topo CARD CHIP CARD CHIP N   link between two chips
 *   fail FUNCTION CARD CODE      that call fails for that card (CARD -1: for all)
 *   hang FUNCTION | crash FUNCTION
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct chip {
    int card, chip, type, logical, physical;
    unsigned health, hbm, used, ddr, available;
    char name[32], npu_name[32];
    int domain;
    unsigned bus, die;
    int power, temp;
    unsigned util;
};
struct rule { char what[8], function[64]; int card, code; };
struct topo { int a, b, c, d, kind; };

static struct chip chips[64];
static struct rule rules[64];
static struct topo topos[64];
static int chip_count, rule_count, topo_count, init_code, v2_init_code, is_read;

static void read_file(void)
{
    char line[512];
    FILE *file;
    if (is_read)
        return;
    is_read = 1;
    v2_init_code = -8255;
    /* Real ones print such lines to standard output. */
    printf("DrvMngGetConsoleLogLevel failed. (ret=4)\n");
    fflush(stdout);
    file = fopen(getenv("FAKE_DCMI") ? getenv("FAKE_DCMI") : "", "r");
    if (!file) {
        init_code = v2_init_code = -8005;
        return;
    }
    while (fgets(line, sizeof line, file)) {
        struct chip c;
        struct rule r;
        struct topo t;
        memset(&c, 0, sizeof c);
        memset(&r, 0, sizeof r);
        if (sscanf(line, "init %d", &init_code) == 1 || sscanf(line, "v2init %d", &v2_init_code) == 1)
            continue;
        if (sscanf(line, "chip %d %d %d %d %d %u %u %u %u %u %31s %31s %d %x %x %d %d %u", &c.card, &c.chip, &c.type,
                   &c.logical, &c.physical, &c.health, &c.hbm, &c.used, &c.ddr, &c.available, c.name, c.npu_name,
                   &c.domain, &c.bus, &c.die, &c.power, &c.temp, &c.util) == 18)
            chips[chip_count++] = c;
        else if (sscanf(line, "topo %d %d %d %d %d", &t.a, &t.b, &t.c, &t.d, &t.kind) == 5)
            topos[topo_count++] = t;
        else if (sscanf(line, "%7s %63s %d %d", r.what, r.function, &r.card, &r.code) >= 2)
            rules[rule_count++] = r;
    }
    fclose(file);
}

static int rule_for(const char *function, int card)
{
    int i;
    read_file();
    for (i = 0; i < rule_count; i++) {
        if (strcmp(rules[i].function, function))
            continue;
        if (!strcmp(rules[i].what, "hang"))
            for (;;)
                sleep(60);
        if (!strcmp(rules[i].what, "crash"))
            abort();
        if (rules[i].card == -1 || rules[i].card == card)
            return rules[i].code;
    }
    return 0;
}

static struct chip *find(int card, int chip)
{
    int i;
    for (i = 0; i < chip_count; i++)
        if (chips[i].card == card && chips[i].chip == chip)
            return &chips[i];
    return NULL;
}

#define CHECKED(function, card)                   \
    do {                                          \
        int code = rule_for(function, card);      \
        if (code)                                 \
            return code;                          \
    } while (0)
#define FOUND(function)                           \
    struct chip *c;                               \
    CHECKED(function, card);                      \
    c = find(card, chip);                         \
    if (!c)                                       \
        return -8007

struct chip_info { char type[32], name[32], version[32]; unsigned cores; };
struct chip_info_v2 { char type[32], name[32], version[32]; unsigned cores; char npu_name[32]; };
struct pcie_info { unsigned vendor, subvendor, device, subdevice; int domain; unsigned bus, dev, func; char reserve[32]; };
struct hbm_info { unsigned long long size; unsigned freq; unsigned long long usage; int temp; unsigned rate; };
struct memory_info {
    unsigned long long size, available;
    unsigned freq;
    unsigned long page_size, pages, pages_free;
    unsigned utiliza;
    unsigned char reserve[60];
};
struct die_id { unsigned part[5]; };

static int names_of(struct chip *c, struct chip_info_v2 *info, int v2)
{
    strcpy(info->type, "Ascend");
    strcpy(info->name, c->name);
    if (v2 && strcmp(c->npu_name, "-"))
        strcpy(info->npu_name, c->npu_name);
    return 0;
}

static int pcie_of(struct chip *c, struct pcie_info *info)
{
    if (!c->bus)
        return -8255;
    if (c->bus == 0xfff) /* answers, and fills in nothing */
        return 0;
    info->vendor = 0x19e5;
    info->domain = c->domain;
    info->bus = c->bus;
    return 0;
}

static int hbm_of(struct chip *c, struct hbm_info *info)
{
    if (!c->hbm)
        return -8255;
    info->size = c->hbm;
    info->usage = c->used;
    return 0;
}

static int die_of(struct chip *c, struct die_id *info)
{
    int i;
    for (i = 0; i < 5; i++)
        info->part[i] = c->die ? c->die + i : 0;
    return 0;
}

/* -- version 1 ------------------------------------------------------------------------------------------------------- */

int dcmi_init(void)
{
    CHECKED("dcmi_init", 0);
    return init_code;
}

int dcmi_get_card_list(int *count, int *list, int length)
{
    int i, n = 0;
    CHECKED("dcmi_get_card_list", 0);
    for (i = 0; i < chip_count && n < length; i++)
        if (!n || list[n - 1] != chips[i].card)
            list[n++] = chips[i].card;
    *count = n;
    return 0;
}

int dcmi_get_device_num_in_card(int card, int *count)
{
    int i;
    CHECKED("dcmi_get_device_num_in_card", card);
    *count = 0;
    for (i = 0; i < chip_count; i++)
        *count += chips[i].card == card;
    return 0;
}

int dcmi_get_device_type(int card, int chip, int *out) { FOUND("dcmi_get_device_type"); *out = c->type; return 0; }
int dcmi_get_device_health(int card, int chip, unsigned *out) { FOUND("dcmi_get_device_health"); *out = c->health; return 0; }
int dcmi_get_device_power_info(int card, int chip, int *out) { FOUND("dcmi_get_device_power_info"); *out = c->power; return 0; }
int dcmi_get_device_temperature(int card, int chip, int *out) { FOUND("dcmi_get_device_temperature"); *out = c->temp; return 0; }
int dcmi_get_device_logic_id(int *out, int card, int chip) { FOUND("dcmi_get_device_logic_id"); *out = c->logical; return 0; }
int dcmi_get_device_pcie_info_v2(int card, int chip, struct pcie_info *out) { FOUND("dcmi_get_device_pcie_info_v2"); return pcie_of(c, out); }
int dcmi_get_device_hbm_info(int card, int chip, struct hbm_info *out) { FOUND("dcmi_get_device_hbm_info"); return hbm_of(c, out); }
int dcmi_get_device_die_v2(int card, int chip, int kind, struct die_id *out) { FOUND("dcmi_get_device_die_v2"); return kind == 1 ? die_of(c, out) : -8001; }
int dcmi_get_device_chip_info_v2(int card, int chip, struct chip_info_v2 *out) { FOUND("dcmi_get_device_chip_info_v2"); return names_of(c, out, 1); }
int dcmi_get_device_chip_info(int card, int chip, struct chip_info *out) { FOUND("dcmi_get_device_chip_info"); return names_of(c, (struct chip_info_v2 *)out, 0); }

int dcmi_get_device_phyid_from_logicid(unsigned logical, unsigned *out)
{
    int i;
    CHECKED("dcmi_get_device_phyid_from_logicid", -2);
    for (i = 0; i < chip_count; i++)
        if (chips[i].logical == (int)logical && chips[i].physical >= 0) {
            *out = chips[i].physical;
            return 0;
        }
    return -8007;
}

int dcmi_get_device_memory_info_v3(int card, int chip, struct memory_info *out)
{
    FOUND("dcmi_get_device_memory_info_v3");
    if (!c->ddr)
        return -8255;
    out->size = c->ddr;
    out->available = c->available;
    return 0;
}

int dcmi_get_device_utilization_rate(int card, int chip, int kind, unsigned *out)
{
    FOUND("dcmi_get_device_utilization_rate");
    *out = c->util;
    return kind == 2 ? 0 : -8001;
}

int dcmi_get_topo_info_by_device_id(int a, int b, int x, int y, int *out)
{
    int i;
    CHECKED("dcmi_get_topo_info_by_device_id", a);
    for (i = 0; i < topo_count; i++)
        if (topos[i].a == a && topos[i].b == b && topos[i].c == x && topos[i].d == y) {
            *out = topos[i].kind;
            return 0;
        }
    return -8255;
}

/* -- version 2 ------------------------------------------------------------------------------------------------------- */

int dcmiv2_init(void)
{
    CHECKED("dcmiv2_init", 0);
    return v2_init_code;
}

int dcmiv2_get_device_list(int *list, int *count, int length)
{
    CHECKED("dcmiv2_get_device_list", 0);
    for (*count = 0; *count < chip_count && *count < length; ++*count)
        list[*count] = chips[*count].card;
    return 0;
}

#define V2(name) int chip = 0; FOUND(name)
int dcmiv2_get_device_type(int card, int *out) { V2("dcmiv2_get_device_type"); *out = c->type; return 0; }
int dcmiv2_get_device_health(int card, unsigned *out) { V2("dcmiv2_get_device_health"); *out = c->health; return 0; }
int dcmiv2_get_device_power_info(int card, int *out) { V2("dcmiv2_get_device_power_info"); *out = c->power; return 0; }
int dcmiv2_get_device_temperature(int card, int *out) { V2("dcmiv2_get_device_temperature"); *out = c->temp; return 0; }
int dcmiv2_get_device_pcie_info(int card, struct pcie_info *out) { V2("dcmiv2_get_device_pcie_info"); return pcie_of(c, out); }
int dcmiv2_get_device_hbm_info(int card, struct hbm_info *out) { V2("dcmiv2_get_device_hbm_info"); return hbm_of(c, out); }
int dcmiv2_get_device_die_id(int card, int kind, struct die_id *out) { V2("dcmiv2_get_device_die_id"); return kind == 1 ? die_of(c, out) : -8001; }
int dcmiv2_get_device_chip_info(int card, struct chip_info_v2 *out) { V2("dcmiv2_get_device_chip_info"); return names_of(c, out, 1); }

int dcmiv2_get_chip_phy_id_by_dev_id(unsigned device, unsigned *out)
{
    struct chip *c = find((int)device, 0);
    CHECKED("dcmiv2_get_chip_phy_id_by_dev_id", (int)device);
    if (!c)
        return -8007;
    *out = c->physical;
    return 0;
}

int dcmiv2_get_device_utilization_rate(int card, int kind, unsigned *out)
{
    V2("dcmiv2_get_device_utilization_rate");
    *out = c->util;
    return kind == 2 ? 0 : -8001;
}

// A producer in Go: only go-redis (go mod tidy && go build -o gewell). Usage:
//
//	./gewell enqueue ID PROMPT    add a job
//	./gewell follow ID            stream its answer, whatever is lost on the way
//	./gewell result ID            print its final record (JSON)
//
// GEWELL_REDIS and GEWELL_NAMESPACE say where.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

const silence = time.Second

var namespace = envOr("GEWELL_NAMESPACE", "gewell")

func envOr(name, fallback string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return fallback
}

// entryID is the id of an entry of the out stream: an epoch and a number in it.
type entryID struct{ epoch, seq uint64 }

func parseID(text string) entryID {
	epoch, seq, _ := strings.Cut(text, "-")
	e, _ := strconv.ParseUint(epoch, 10, 64)
	s, _ := strconv.ParseUint(seq, 10, 64)
	return entryID{e, s}
}

func (id entryID) isOld(last entryID) bool {
	return id.epoch < last.epoch || (id.epoch == last.epoch && id.seq <= last.seq)
}

func (id entryID) isNext(last entryID) bool {
	return id.epoch == last.epoch && id.seq == last.seq+1
}

// follower prints every piece of text once and in order.
type follower struct {
	link  *redis.Client
	jobID string
	last  string // id of the newest entry taken
	at    int    // bytes of text before the next chunk; less than shown while a new epoch repeats what was shown
	shown int
	state string
}

func (f *follower) run(ctx context.Context) string {
	for f.state == "" {
		if err := f.listen(ctx); err != nil { // (5) a lost link: from the top
			time.Sleep(200 * time.Millisecond)
		}
	}
	return f.state
}

func (f *follower) listen(ctx context.Context) error {
	channel := f.link.Subscribe(ctx, namespace+":ev:"+f.jobID) // (1)
	defer channel.Close()
	if _, err := channel.Receive(ctx); err != nil { // confirmed: what comes now is announced
		return err
	}
	if err := f.readRange(ctx); err != nil {
		return err
	}
	for f.state == "" {
		received, err := channel.ReceiveTimeout(ctx, silence)
		var timeout interface{ Timeout() bool }
		if errors.As(err, &timeout) && timeout.Timeout() {
			err = f.readRange(ctx) // (4)
		} else if message, ok := received.(*redis.Message); err == nil && ok {
			err = f.onMessage(ctx, message.Payload)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (f *follower) onMessage(ctx context.Context, message string) error {
	entry, payload, _ := strings.Cut(message, " ")
	id, last := parseID(entry), parseID(f.last)
	if f.last != "" && id.isOld(last) {
		return nil
	}
	if f.last == "" || !id.isNext(last) {
		return f.readRange(ctx) // a gap, or another epoch
	}
	var probe struct {
		State *string `json:"state"`
	}
	if err := json.Unmarshal([]byte(payload), &probe); err != nil {
		return err
	}
	if probe.State != nil {
		return f.take(entry, "end", payload)
	}
	return f.take(entry, "d", payload) // (3)
}

// readRange reads everything behind last from the stream itself (2).
func (f *follower) readRange(ctx context.Context) error {
	out := namespace + ":out:" + f.jobID
	start := f.last
	if start == "" {
		start = "-"
	}
	rows, err := f.link.XRange(ctx, out, start, "+").Result()
	if err == nil && f.last != "" && (len(rows) == 0 || rows[0].ID != f.last) { // another stream than was read so far
		f.last, f.at = "", 0
		rows, err = f.link.XRange(ctx, out, "-", "+").Result()
	}
	if err != nil {
		return err
	}
	for _, row := range rows {
		for field, payload := range row.Values {
			if row.ID == f.last {
				continue
			}
			if err := f.take(row.ID, field, payload.(string)); err != nil {
				return err
			}
		}
	}
	if len(rows) > 0 {
		return nil
	}
	raw, err := f.link.Get(ctx, namespace+":res:"+f.jobID).Result() // (6) no stream: the record may stand
	if errors.Is(err, redis.Nil) {
		return nil
	}
	var record struct{ Text, State string }
	if err == nil {
		err = json.Unmarshal([]byte(raw), &record)
	}
	if err == nil {
		f.at = 0
		f.show(record.Text)
		f.state = record.State
	}
	return err
}

func (f *follower) take(entry, field, payload string) error {
	f.last = entry
	var data struct {
		T, Ch, State string
		Keep         int
	}
	if field == "fence" {
		return nil
	}
	if err := json.Unmarshal([]byte(payload), &data); err != nil {
		return err
	}
	switch {
	case field == "d" && data.Ch == "content":
		f.show(data.T)
	case field == "restart" && data.Keep == 0: // the stream was lost and is written again
		f.at = 0
	case field == "end":
		f.state = data.State
	}
	return nil
}

func (f *follower) show(text string) {
	end := f.at + len(text)
	if end > f.shown {
		known := f.shown - f.at // of this text; below zero: none
		if known < 0 {
			known = 0
		}
		fmt.Print(text[known:])
		f.shown = end
	}
	f.at = end
}

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: gewell enqueue ID PROMPT | follow ID | result ID")
		os.Exit(2)
	}
	options, err := redis.ParseURL(envOr("GEWELL_REDIS", "redis://127.0.0.1:6379/0"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	ctx, link := context.Background(), redis.NewClient(options)
	defer link.Close()
	command, jobID := os.Args[1], os.Args[2]
	switch command {
	case "enqueue":
		prompt := strings.Join(os.Args[3:], " ")
		body, _ := json.Marshal(map[string]any{
			"kind": "completion", "request": map[string]any{"prompt": prompt, "max_tokens": 64},
		})
		values := []any{"v", 1, "id", jobID, "body", body}
		var entry string
		entry, err = link.XAdd(ctx, &redis.XAddArgs{Stream: namespace + ":jobs:normal", Values: values}).Result()
		fmt.Println(entry)
	case "follow":
		state := (&follower{link: link, jobID: jobID}).run(ctx)
		fmt.Println()
		if state != "done" {
			err = fmt.Errorf("ended as %s", state)
		}
	case "result":
		var record string
		if record, err = link.Get(ctx, namespace+":res:"+jobID).Result(); err == nil {
			fmt.Println(record)
		}
	default:
		err = fmt.Errorf("unknown command %s", command)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
